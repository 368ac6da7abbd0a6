"""The arguments of `regard train`."""

import argparse

from regard.cli.arguments import derived

RELEASED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")

EPILOG = """\
A run is one folder, --out: checkpoints, log.jsonl with a line per step, model,
which GPT2.load and --model read, and plots at the end. The same command resumes
from the last checkpoint. A config file is TOML: each setting has the name of
its flag here, and the sizes are under [model]."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `regard train`: a flag for each field of the config, and of its model."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file of these settings; flags override it")
    parser.add_argument("--observe", metavar="every=N", help="every N steps, write the kind of each head to heads.jsonl")
    parser.add_argument(
        "--plan",
        nargs="?",
        const="config",
        choices=["config", *RELEASED],
        metavar="NAME",
        help="only print the memory, links and time needed: for these settings, or with the sizes of gpt2, gpt2-medium, "
        "gpt2-large, gpt2-xl",
    )
    parser.add_argument("--accelerators", nargs="+", type=int, metavar="N", help="for --plan: how many (1)")
    parser.add_argument("--link", type=float, metavar="X", help="for --plan: GB per second that each can send")
    for flag in derived.read_flags("train"):
        derived.add_flag(parser, **flag)
