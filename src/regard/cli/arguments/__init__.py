"""The arguments of each command: parsed, checked and explained by --help without PyTorch, which takes seconds to import."""

COMMANDS = (
    "walk",
    "look",
    "see",
    "heads",
    "atlas",
    "audit",
    "serve",
    "generate",
    "train",
    "evaluate",
    "translate",
    "examine",
    "verify",
    "info",
)
