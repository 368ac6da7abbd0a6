"""What `import regard` does: nothing but hand over names."""

import json
import subprocess
import sys

import pytest

import regard


def run_in_new_python(code: str) -> str:
    """What a new Python prints that runs this code."""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return ran.stdout


def test_every_public_name_is_there():
    assert [name for name in regard.__all__ if not hasattr(regard, name)] == []
    assert sorted(regard.__all__, key=lambda name: (name != "GPT2", name)) == regard.__all__


WATCH = """
import json, sys, warnings, torch, torch.nn.functional as F

def state():
    return F.scaled_dot_product_attention, torch.get_rng_state().tolist(), list(warnings.filters)

modules, before = set(sys.modules), state()
import regard
at_once = sorted(set(sys.modules) - modules)
regard.attend, regard.AttentionMap, regard.CausalAttention
after = sorted(set(sys.modules) - modules)
print(json.dumps({"at once": at_once, "modules": after, "same": [a == b for a, b in zip(before, state())]}))
"""


@pytest.fixture(scope="module")
def import_report() -> dict:
    """What importing torch, and then regard, left in a new Python."""
    return json.loads(run_in_new_python(WATCH))


@pytest.mark.slow
def test_importing_prints_nothing_and_patches_nothing(import_report):
    assert import_report["same"] == [True, True, True]


@pytest.mark.slow
def test_importing_brings_in_nothing_but_regard_and_the_standard_library(import_report):
    tops = {name.split(".")[0] for name in import_report["modules"]}
    assert tops - set(sys.stdlib_module_names) <= {"regard", "torch"}


@pytest.mark.slow
def test_importing_reaches_only_the_packages_that_need_nothing_more_than_torch(import_report):
    packages = {name.split(".")[1] for name in import_report["modules"] if name.startswith("regard.")}
    assert [name for name in import_report["at once"] if name.startswith("regard.")] == [
        "regard.errors",
        "regard.html_repr",
        "regard.terminal_escapes",
    ]
    assert packages == {"errors", "terminal_escapes", "html_repr", "compiled", "mechanism", "map", "layers", "matmul"}


GENERATE = """
import sys
from regard.cli import main

main(["generate", "ABC", "--model", "sorter", "--tokens", "1"])
heavy = "regard.observe", "regard.show.page", "regard.examination", "transformers", "matplotlib", "starlette", "pandas"
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.slow
def test_generating_waits_for_nothing_that_only_looking_needs():
    assert run_in_new_python(GENERATE).splitlines()[-1] == "[]"


HELP = """
import contextlib, io, sys
before = set(sys.modules)
from regard.__main__ import main
sys.argv = ["regard", *{arguments!r}]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(*(name for name in sys.modules if name not in before))
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["look", "--help"], ["walk", "--help"], ["examine", "--help"]]
)
def test_help_imports_the_flags_and_little_of_the_standard_library(arguments):
    found = set(run_in_new_python(HELP.format(arguments=arguments)).split())
    packages = {name.split(".")[0] for name in found}
    assert packages <= {"regard", *sys.stdlib_module_names}  # neither torch nor rich, which take seconds and tenths of one
    assert not packages & {"logging", "subprocess", "tempfile", "urllib", "asyncio", "dataclasses", "inspect"}
    assert {name for name in found if name.startswith("regard.cli.")} <= {
        name for name in found if name.startswith("regard.cli.arguments")
    }
    if arguments[0] in ("look", "walk"):
        others = {"regard.cli.arguments.examine", "regard.cli.arguments.train", "regard.cli.arguments.atlas"}
        assert not found & others
