"""What may stand after a command: explained at once, without PyTorch, and as the classes have it whose fields the flags are."""

import json
import subprocess
import sys

import pytest
from docs.flags import derive

from regard.cli import main
from regard.cli.arguments import COMMANDS, derived

HEAVY = {"torch", "numpy", "numba", "rich", "transformers"}  # torch takes a second or more
WATCHED = """
import json, runpy, sys
sys.argv = ["regard", *json.loads(sys.argv[1])]
try:
    runpy.run_module("regard", run_name="__main__")
finally:
    print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def run(*arguments: str) -> tuple[int, str, set[str]]:
    """The exit code, what was printed, and which packages were imported."""
    command = [sys.executable, "-W", "error", "-c", WATCHED, json.dumps(arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    printed, _, imported = ran.stdout.rstrip().rpartition("\n")
    return ran.returncode, printed + ran.stderr, set(json.loads(imported))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_printed_without_pytorch(command):
    code, printed, imported = run(command, "--help")
    assert (code, imported & HEAVY) == (0, set())
    assert printed.startswith(f"usage: regard {command}")


@pytest.mark.parametrize("arguments", [[], ["--list"], ["--example", "dog"]], ids=str)
def test_the_lectures_examples_are_shown_without_pytorch(arguments):
    code, printed, imported = run("walk", *arguments)
    assert (code, imported & (HEAVY - {"rich"})) == (0, set())
    assert printed.count("\n") > 10


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_texts_of_the_help_fit_the_screen(capsys, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage, *parts = capsys.readouterr().out.split("\n\n")
    assert usage.startswith("usage: ")
    for part in parts:
        for line in part.splitlines():
            assert len(line) <= columns or line.strip().startswith("--")  # the flag itself
    assert " ".join(COMMANDS[command].split()) in " ".join(parts[0].split())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "COMMAND"),
        ([], 0, "COMMAND"),
        (["--version"], 0, "regard "),
        (["generate"], 2, "the following arguments are required: TEXT"),
        (["generate", "a", "--temperature", "warm"], 2, "invalid float value"),
        (["look", "a", "--nothing"], 2, "unrecognized arguments: --nothing"),
        (["nothing"], 2, "invalid choice"),
    ],
    ids=str,
)
def test_so_are_the_commands_the_version_and_what_is_wrong_with_a_flag(arguments, code, says):
    found, printed, imported = run(*arguments)
    assert (found, imported & HEAVY) == (code, set())
    assert says in printed


def test_the_flags_are_those_of_the_classes():
    assert derived.read_flags_file() == derive(), "python -m docs.flags writes them anew"
