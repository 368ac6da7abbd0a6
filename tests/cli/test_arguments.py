"""What may stand after a command: explained at once, without PyTorch, and as the classes have it whose fields the flags are."""

import json
import subprocess
import sys

import pytest
from docs.flags import derive

from regard.cli import main
from regard.cli.arguments import COMMANDS, derived
from regard.models import GPT2

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
            assert len(line) <= columns
    for line in usage.splitlines()[1:]:
        assert len(line) <= columns
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["heads", "--sort", "wizardry"], "there is no score 'wizardry'; the scores are previous token, "),
        (["heads", "--sort", "retrieval"], "there is no score 'retrieval'"),
        (["heads", "--sort", "effect on text", "--ablate", "all"], "there is no score 'effect on text'"),
        (["heads", "--sort", "effect", "--ablate", "none"], "there is no score 'effect'"),
        (["heads", "--sort", "punctuation"], "there is no score 'punctuation'"),
        (["heads", "--seeds", "1"], "--seeds must be a whole number of at least 2"),
        (["heads", "--haystack", "absent.txt"], "absent.txt is not a file"),
        (["heads", "--text", "absent.txt"], "absent.txt is not a file"),
        (["look", "words", "--sort", "wizardry"], "there is no score 'wizardry'; the scores are previous token, "),
        (["look", "words", "--sort", "copying"], "there is no score 'copying'"),
        (["examine", "--json", "--format", "sarif"], "--json and --format sarif are two formats"),
        (["examine", "--json", "--format", "github"], "--json and --format github are two formats"),
        (["heads", "--ablate", "none", "--by", "zero"], "--by is of ablated heads"),
        (["heads", "--ablate", "none", "--text", "story.txt"], "--text is of ablated heads"),
        (["look", "words", "--why", "--keep", "bfloat16"], "leave out --keep"),
        (["look", "words", "--json", "--head", "0.1"], "--json is for the table of the heads"),
        (["look", "words", "--csv", "--query", "words"], "--csv is for the table of the heads"),
        (["look", "words", "--keep", "int3"], "keep takes bfloat16"),
        (["generate", "words", "--temperature=-1"], "temperature"),
        (["generate", "words", "--top-k=-1"], "top_k"),
        (["generate", "words", "--device", "nowhere"], "--device nowhere cannot be used"),
        (["evaluate", "--on", __file__, "--held-out", "0.1"], "--held-out applies to a corpus"),
        (["atlas", "--on", __file__, "--out", "atlas", "--shard", "2/2"], "--shard is I/N with I from 0 to N - 1"),
        (["atlas", "--on", __file__, "--out", "atlas", "--tokens", "8"], "tokens must be"),
    ],
    ids=str,
)
def test_what_no_model_can_do_is_refused_before_one_is_loaded(capsys, monkeypatch, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(GPT2, "load", staticmethod(lambda *_: pytest.fail("the model is loaded")))
    assert main([*arguments, "--model", "pocket"]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_the_flags_are_those_of_the_classes():
    assert derived.read_flags_file() == derive(), "python -m docs.flags writes them anew"
