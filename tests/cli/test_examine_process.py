"""What regard examine loads and what it says of it, in the process that runs the subject."""

import argparse
import io
import json
import sys

import pytest

from cli.layers_to_examine import write_layers
from regard.cli.arguments.examine import add_arguments
from regard.cli.examine_process import write_result


@pytest.fixture
def file(tmp_path, monkeypatch):
    yield write_layers(tmp_path, monkeypatch)
    sys.modules.pop("attention_of_mine", None)


def collect_result(arguments):
    """The exit code, the text to print and the error to show, of which there is one."""
    parser, stream = argparse.ArgumentParser(), io.StringIO()
    add_arguments(parser)
    write_result(parser.parse_args([*map(str, arguments)]), stream)
    last = json.loads(stream.getvalue().splitlines()[-1])
    return last.get("code", 2), last.get("text"), last.get("error")


def test_a_right_class_is_clean_and_ends_with_0(file):
    code, out, err = collect_result([f"{file}:Attention", "--args", "14", "6", "bias=True", "name=fancy"])
    assert code == 0
    assert "Attention: no finding (expects Causal())" in out
    assert err is None


@pytest.mark.parametrize("name", ["Holder.layer", "function"])
def test_an_object_or_a_function_is_examined_as_it_is(name, file):
    code, out, _ = collect_result([f"{file}:{name}", "--expects", "none" if name == "function" else "causal"])
    assert code == 0, out


@pytest.mark.slow
def test_a_function_that_makes_a_layer_is_called_where_it_has_args(file):
    assert collect_result([f"{file}:maker", "--args", "width=9"])[0] == 0
    assert collect_result([f"{file}:maker", "--args"])[0] == 0


def test_what_is_expected_is_reported(file):
    code, out, _ = collect_result([f"{file}:Attention", "--args", 14, 6, "--expects", "causal&window:2"])
    assert code == 1
    assert "wrong mask" in out
    assert collect_result([f"{file}:Leaking", "--args", 14, 6, "--expects", "none"])[0] == 0


def test_the_page_says_what_the_terminal_says_and_is_written_whole_or_not_at_all(file, tmp_path):
    code, out, _ = collect_result([f"{file}:Leaking", "--args", 14, 6, "--page", tmp_path / "report.html"])
    kind = out.split("\n\n")[1].split("  ")[0]
    written = (tmp_path / "report.html").read_text()
    assert (code, kind) == (1, "future leak")
    assert kind in written
    assert written.startswith("<!doctype html>")
    code, _, err = collect_result([f"{file}:Leaking", "--args", 14, 6, "--page", tmp_path / "no" / "report.html"])
    assert code == 2
    assert f"--page {tmp_path / 'no' / 'report.html'}: No such file" in err


@pytest.mark.slow
def test_a_module_of_a_package_is_examined():
    code, out, _ = collect_result(["regard.layers:MultiHeadAttention", "--args", 14, 30, 17, 0.1, 5])
    assert code == 0
    assert "MultiHeadAttention: no finding" in out
    assert collect_result(["regard:attention", "--expects", "none"])[0] == 0


def test_a_whole_model_is_examined(file):
    code, out, _ = collect_result(["transformers:GPT2Model._from_config", "--args"])
    assert code == 2  # a config is missing
    file.write_text(
        "from regard import GPT2, GPT2Config\nmodel = GPT2(GPT2Config(layers=2, heads=2, width=8, context=9, vocabulary=17))"
    )
    code, out, _ = collect_result([f"{file}:model"])
    assert code == 0
    assert "in 2 layers, by the masks of the recorded calls" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "FILE.py:NAME or package.module:NAME"),
        (["no/such/file.py:Name"], "there is no file"),
        (["no_such_package:Name"], "could not be imported: ModuleNotFoundError"),
        (["regard.layers:MultiHedAttention"], "has no MultiHedAttention. It has "),
        (["FILE:Missing"], "has no Missing. It has"),
        (["FILE:Attention"], "could not be created with no --args: TypeError"),
        (["FILE:Attention", "--args", "14", "6", "name=other"], "could not be created with 14 6 name=other: AssertionError"),
        (["FILE:Holder.layer", "--args", "14"], "leave out --args"),
        (["FILE:number"], "takes a module or a function"),
        (["FILE:Attention", "--args", "14", "6", "--expects", "casual"], "--expects 'casual' is not a rule"),
        (["FILE:Attention", "--args", "14", "6", "--sample", "2,x"], "--sample must be the shape of x"),
    ],
)
def test_what_cannot_be_examined_is_one_line_and_exit_code_2(arguments, says, file):
    code, _, err = collect_result([one.replace("FILE", str(file)) for one in arguments])
    assert code == 2
    assert says in err
    assert "\n" not in err


@pytest.mark.parametrize("broken", ["1 / 0", "raise SystemExit(3)", "raise GeneratorExit", "def f(:", "import beside.nothing"])
def test_a_file_that_cannot_be_run_is_one_line(broken, file):
    file.write_text(broken)
    code, _, err = collect_result([f"{file}:Attention"])
    assert code == 2
    assert "could not be run" in err
    assert "\n" not in err
