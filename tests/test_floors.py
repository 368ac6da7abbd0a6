"""The floors of the house: a module imports its own room or a lower floor, and no imports go round in a circle."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "regard"
FLOORS = [
    {"printable"},
    {"errors", "malloc", "shown", "writing", "compiled"},
    {"mechanism", "products", "machine"},
    {"map", "layers", "text", "weights", "generate"},
    {"models", "lectures"},
    {"observe"},
    {"examination"},  # a whole model is examined through what is observed of it
    {"train", "evaluate"},
    {"show"},
    {"cli"},
]
DOOR = {"__init__", "__main__"}  # they hand names on, and nobody below imports them
EDGES = {  # a heavy dependency, and the only modules that may import it
    "starlette": {"show.page.server", "show.page.desk", "show.page.stream", "show.page.answers"},
    "uvicorn": {"show.page.server", "show.page.patience"},
    "matplotlib": {f"show.{name}" for name in ("figure", "head_figure", "every_head", "arcs", "profiles", "curves")},
    "safetensors": {"weights", "observe.files"},
    "huggingface_hub": {"weights"},
    "google_crc32c": {"weights"},
    "tiktoken": {"text"},
    "tokenizers": {"text"},
    "sacrebleu": {"evaluate.translation"},
    "torch.distributed": {"train.engine", "train.checkpoints"},
    "transformers": {"cli.foreign"},  # elsewhere it is met where the program has imported it
    "rich": {"show", "cli"},
    "numba": {
        "compiled",
        "map.compiled",
        "mechanism.compiled",
        "models.compiled",
        "products.compiled",
        "train.compiled",
    },
    "llvmlite": {"compiled"},
}


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


@cache
def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}


def imports(source: str) -> set[str]:
    """Every module named by an import, at the top or inside a function; relative ones are not used in this house."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the room"
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def inside(name: str, place: str) -> bool:
    return f"{name}.".startswith(f"{place}.")


def breaches(module: str, named: set[str]) -> list[str]:
    """What these imports break of the rules, for a module by its dotted name."""
    room = module.split(".")[0]
    found = []
    if room in DOOR:
        return found
    for name in named:
        top, _, rest = name.partition(".")
        if name == "regard" and room != "cli":
            found.append(f"{module} imports the door")
        if top == "regard" and rest:
            other = rest.split(".")[0]
            if other in set().union(*FLOORS) and other != room and floor_of(other) >= floor_of(room):
                found.append(f"{module} (floor {floor_of(room)}) imports {other} (floor {floor_of(other)})")
        for heavy, allowed in EDGES.items():
            if (name == heavy or name.startswith(heavy + ".")) and not any(
                f"{module}.".startswith(f"{place}.") for place in allowed
            ):
                found.append(f"{module} imports {heavy}")
    return found


def test_every_room_stands_on_a_floor():
    rooms = {name.split(".")[0] for name in modules()} - DOOR
    assert rooms <= set().union(*FLOORS)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_its_own_room_or_a_lower_floor(module):
    assert breaches(module, imports(modules()[module].read_text(encoding="utf-8"))) == []


def test_no_imports_go_round_in_a_circle():
    graph = {name: edges(name) for name in modules()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def edges(name: str) -> set[str]:
    """The modules that a module imports; a package's face is its __init__, and is left out for modules inside it."""
    found = set()
    for imported in imports(modules()[name].read_text(encoding="utf-8")):
        target = imported.removeprefix("regard.") if imported.startswith("regard.") else None
        if target in modules() and target != name:
            found.add(target)
        elif target and f"{target}.__init__" in modules() and not name.startswith(f"{target}."):
            found.add(f"{target}.__init__")
    return found


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("mechanism.steps", "def f():\n    from regard.layers import causal", "floor 2"),
        ("layers.causal", "import regard.weights.arrays", "floor 3"),
        ("layers.causal", "from regard import weights", "floor 3"),
        ("layers.causal", "from regard import attend", "imports the door"),
        ("models.gpt2", "import safetensors.torch", "imports safetensors"),
        ("show.terminal", "from matplotlib import figure", "imports matplotlib"),
        ("observe.record", "import transformers", "imports transformers"),
    ],
)
def test_a_breach_of_the_rules_is_seen(module, source, says):
    assert any(says in breach for breach in breaches(module, imports(source)))


def test_what_the_rules_allow_is_not_a_breach():
    allowed = [
        ("layers.causal", "from regard.mechanism import attend\nfrom regard.layers import checks"),
        ("weights.arrays", "import safetensors"),
        ("cli.walk", "import regard\nfrom regard.show import terminal"),
    ]
    for module, source in allowed:
        assert breaches(module, imports(source)) == []
