"""The layers of packages: a module imports from its own package or a lower layer, and no imports form a cycle."""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "regard"
LAYERS = [
    {"terminal_escapes"},
    {"errors", "evaluation_mode", "malloc", "html_repr", "atomic_write", "compiled"},
    {"mechanism", "matmul", "machine"},
    {"map", "layers", "text", "weights", "generate"},
    {"models", "lectures", "policies"},
    {"observe"},
    {"examination", "attribution"},  # a whole model is examined through what is observed of it
    {"probe"},
    {"train", "evaluate", "policy_audit"},
    {"show"},
    {"head_atlas"},
    {"cli", "pytest_plugin"},
]
HANDWRITTEN = [  # the folders of handwritten attention, from the lowest; the files beside them import all
    {"products"},
    {"ancestors"},
    {"scores"},
    {"softmax"},
    {"recurrences"},
    {"linear", "unread"},
]
ENTRY_POINTS = {"__init__", "__main__"}  # they re-export names, and no module below imports them
HEAVY_IMPORTERS = {  # a heavy dependency, and the only modules that may import it
    "starlette": {"show.page.routes", "show.page.executor", "show.page.ndjson", "show.page.handlers"},
    "uvicorn": {"show.page.server", "show.page.timeouts"},
    "matplotlib": {
        f"show.{name}"
        for name in (
            "figure",
            "head_figure",
            "head_grid_figure",
            "audit_figure",
            "all_heads",
            "arcs",
            "profiles",
            "training_curves",
            "image_overlay",
            "sound_figure",
            "signed_figure",
            "pooled_axes",
        )
    },
    "safetensors": {"weights", "observe.files.safetensors_file", "head_atlas.plan"},
    "huggingface_hub": {"weights"},
    "google_crc32c": {"weights"},
    "tiktoken": {"text"},
    "tokenizers": {"text"},
    "sacrebleu": {"evaluate.translation_scores"},
    "torch.distributed": {"train.distributed", "train.checkpoints", "observe.tensor_parallel"},
    # elsewhere transformers is used only where the program has imported it
    "transformers": {"cli.model_loading", "cli.image_model", "cli.image_prompt"},
    "rich": {"show", "cli"},
    "numba": {
        "compiled",
        "map.compiled",
        "mechanism.compiled",
        "models.numba_decoder",
        "policies.numba_eviction",
        "policies.numba_largest_keys",
        "policy_audit.numba_chosen_keys",
        "policy_audit.numba_kept_rows",
        "layers.numba_gelu",
        "matmul.amx_intrinsics",
        "matmul.numba_dequantize",
        "matmul.numba_int16_panels",
        "matmul.numba_matmul",
        "matmul.numba_quantized",
        "matmul.numba_row_tiles",
        "train.fused_loops",
    },
    "llvmlite": {
        "compiled",
        "matmul.amx_intrinsics",
        "matmul.numba_dequantize",
        "matmul.numba_int16_panels",
        "matmul.numba_row_tiles",
    },
}


def get_layer(package: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package in packages)


@cache
def list_modules() -> dict[str, Path]:
    return {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def read_imports(module: str) -> set[str]:
    return list_imports(list_modules()[module].read_text(encoding="utf-8"))


def list_imports(source: str) -> set[str]:
    """Every module named by an import, at the top or inside a function; relative ones are not used."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the package"
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def find_violations(module: str, named: set[str]) -> list[str]:
    """Return a sentence for each of these imports of a module that the rules forbid."""
    package = module.split(".")[0]
    found = []
    if package in ENTRY_POINTS:
        return found
    for name in named:
        top, _, rest = name.partition(".")
        if name == "regard" and package != "cli":
            found.append(f"{module} imports regard/__init__.py")
        if top == "regard" and rest:
            other = rest.split(".")[0]
            if other in set().union(*LAYERS) and other != package and get_layer(other) >= get_layer(package):
                found.append(f"{module} (layer {get_layer(package)}) imports {other} (layer {get_layer(other)})")
        for heavy, allowed in HEAVY_IMPORTERS.items():
            if (name == heavy or name.startswith(heavy + ".")) and not any(
                f"{module}.".startswith(f"{place}.") for place in allowed
            ):
                found.append(f"{module} imports {heavy}")
    return found


def test_every_package_is_in_a_layer():
    packages = {name.split(".")[0] for name in list_modules()} - ENTRY_POINTS
    assert packages <= set().union(*LAYERS)


def test_a_module_imports_its_own_package_or_a_lower_layer():
    assert [violation for module in list_modules() for violation in find_violations(module, read_imports(module))] == []


def test_a_folder_of_handwritten_attention_imports_lower_ones():
    base = "observe.interception.handwritten."
    layers = {name: number for number, names in enumerate(HANDWRITTEN) for name in names}
    found = []
    for module in list_modules():
        folder, _, file = module.removeprefix(base).partition(".")
        if module.startswith(base) and file:
            for name in read_imports(module):
                other = name.removeprefix(f"regard.{base}").split(".")[0]
                if name.startswith(f"regard.{base}") and other != folder and layers.get(other, len(layers)) >= layers[folder]:
                    found.append(f"{module} imports {name}")
    assert found == []


def test_no_imports_form_a_cycle():
    graph = {name: list_own_imports(name) for name in list_modules()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def list_own_imports(name: str) -> set[str]:
    """The modules that a module imports; a package stands for its __init__, which is left out for modules inside it."""
    found = set()
    for imported in read_imports(name):
        target = imported.removeprefix("regard.") if imported.startswith("regard.") else None
        if target in list_modules() and target != name:
            found.add(target)
        elif target and f"{target}.__init__" in list_modules() and not name.startswith(f"{target}."):
            found.add(f"{target}.__init__")
    return found


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("mechanism.steps", "def f():\n    from regard.layers import causal", "layer 2"),
        ("layers.causal", "import regard.weights.arrays", "layer 3"),
        ("layers.causal", "from regard import weights", "layer 3"),
        ("layers.causal", "from regard import attend", "imports regard/__init__.py"),
        ("models.gpt2", "import safetensors.torch", "imports safetensors"),
        ("show.terminal", "from matplotlib import figure", "imports matplotlib"),
        ("observe.record", "import transformers", "imports transformers"),
    ],
)
def test_a_violation_of_the_rules_is_found(module, source, says):
    assert any(says in violation for violation in find_violations(module, list_imports(source)))


def test_what_the_rules_allow_is_no_violation():
    allowed = [
        ("layers.causal", "from regard.mechanism import attend\nfrom regard.layers import checks"),
        ("weights.arrays", "import safetensors"),
        ("cli.walk", "import regard\nfrom regard.show import terminal"),
    ]
    for module, source in allowed:
        assert find_violations(module, list_imports(source)) == []
