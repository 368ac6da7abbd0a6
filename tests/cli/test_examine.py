"""regard examine: what it loads, what it prints, and how it ends."""

import json
import subprocess
import sys

import pytest
import torch

from regard.cli import main

LAYERS = '''
"""A file as somebody writes it."""
import math
import torch
from torch import nn
from beside import WIDTH


class Attention(nn.Module):
    leak = False

    def __init__(self, d_in, d_out, bias=False, name="plain"):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=bias) for _ in range(3))
        assert name in ("plain", "fancy")

    def forward(self, x):
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
        hidden = torch.ones_like(scores).triu(1).bool()
        return (scores if self.leak else scores.masked_fill(hidden, -torch.inf)).softmax(-1) @ v


class Leaking(Attention):
    leak = True


class Holder:
    layer = Attention(WIDTH, 6)


def function(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def maker(width=WIDTH):
    print("making")
    return Attention(width, 6)


number = 7
print("running")
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # and what the command puts before it is gone afterwards
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    (tmp_path / "beside.py").write_text("WIDTH = 14\n")
    path = tmp_path / "attention_of_mine.py"
    path.write_text(LAYERS)
    yield path
    sys.modules.pop("attention_of_mine", None)


def ended(arguments, capsys):
    """The exit code, and what was printed."""
    try:
        code = main(["examine", *map(str, arguments)])
    except SystemExit as left:
        code = left.code
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_right_class_is_clean_and_ends_with_0(file, capsys):
    code, out, err = ended([f"{file}:Attention", "--args", "14", "6", "bias=True", "name=fancy"], capsys)
    assert code == 0
    assert "Attention: no finding (expects Causal())" in out
    assert err == ""


def test_a_finding_ends_with_1(file, capsys):
    code, out, _ = ended([f"{file}:Leaking", "--args", 14, 6], capsys)
    assert code == 1
    assert "future leak" in out
    assert "masked_fill" in out


@pytest.mark.parametrize("name", ["Holder.layer", "function"])
def test_an_object_or_a_function_is_examined_as_it_is(name, file, capsys):
    code, out, _ = ended([f"{file}:{name}", "--expects", "none" if name == "function" else "causal"], capsys)
    assert code == 0, out


def test_a_function_that_makes_a_layer_is_called_where_it_has_args(file, capsys):
    assert ended([f"{file}:maker", "--args", "width=9"], capsys)[0] == 0
    assert ended([f"{file}:maker", "--args"], capsys)[0] == 0


def test_what_is_expected_is_told(file, capsys):
    code, out, _ = ended([f"{file}:Attention", "--args", 14, 6, "--expects", "causal&window:2"], capsys)
    assert code == 1
    assert "wrong mask" in out
    assert ended([f"{file}:Leaking", "--args", 14, 6, "--expects", "none"], capsys)[0] == 0


def test_a_stated_scale_and_a_sample_are_used(file, capsys):
    assert ended([f"{file}:Attention", "--args", 14, 6, "--scale", "0.3"], capsys)[0] == 1
    code, out, _ = ended([f"{file}:function", "--expects", "none", "--sample", "2,3,5,8"], capsys)
    assert code == 0
    assert "5 tokens, width 8" in out.replace("\n                       ", " ")


def test_json_is_the_whole_report_and_nothing_else(file, capsys):
    code, out, err = ended([f"{file}:Leaking", "--args", 14, 6, "--json"], capsys)
    record = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 1
    assert record["ok"] is False
    assert record["findings"][0]["kind"] == "future leak"
    assert "running" in err


def test_the_page_says_what_the_terminal_says_and_is_written_whole_or_not_at_all(file, tmp_path, capsys):
    assert main(["examine", f"{file}:Leaking", "--args", "14", "6", "--page", str(tmp_path / "report.html")]) == 1
    kind = capsys.readouterr().out.split("\n\n")[1].split("  ")[0]
    written = (tmp_path / "report.html").read_text()
    assert kind == "future leak"
    assert kind in written
    assert written.startswith("<!doctype html>")
    assert main(["examine", f"{file}:Leaking", "--args", "14", "6", "--page", str(tmp_path / "no" / "report.html")]) == 2
    assert f"--page {tmp_path / 'no' / 'report.html'}: No such file" in capsys.readouterr().err


def test_a_module_of_a_package_is_examined(capsys):
    code, out, _ = ended(["regard.layers:MultiHeadAttention", "--args", 14, 30, 17, 0.1, 5], capsys)
    assert code == 0
    assert "MultiHeadAttention: no finding" in out
    assert ended(["regard:attention", "--expects", "none"], capsys)[0] == 0


def test_a_module_of_the_folder_it_runs_in_is_examined(file, capsys, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert ended(["attention_of_mine:Attention", "--args", 14, 6], capsys)[0] == 0


def test_a_whole_model_is_examined(file, capsys):
    code, out, _ = ended(["transformers:GPT2Model._from_config", "--args"], capsys)
    assert code == 2  # a config is missing
    file.write_text(
        "from regard import GPT2, GPT2Config\nmodel = GPT2(GPT2Config(layers=2, heads=2, width=8, context=9, vocabulary=17))"
    )
    code, out, _ = ended([f"{file}:model"], capsys)
    assert code == 0
    assert "recorded weights of 2" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "FILE.py:NAME or package.module:NAME"),
        (["no/such/file.py:Name"], "there is no file"),
        (["no_such_package:Name"], "could not be imported: ModuleNotFoundError"),
        (["regard.layers:MultiHedAttention"], "has no MultiHedAttention. It has "),
        (["FILE:Missing"], "has no Missing. It has"),
        (["FILE:Attention"], "could not be made with no --args: TypeError"),
        (["FILE:Attention", "--args", "14", "6", "name=other"], "could not be made with 14 6 name=other: AssertionError"),
        (["FILE:Holder.layer", "--args", "14"], "leave --args out"),
        (["FILE:number"], "takes a module or a function"),
        (["FILE:Attention", "--args", "14", "6", "--expects", "casual"], "--expects 'casual' is no rule"),
        (["FILE:Attention", "--args", "14", "6", "--sample", "2,x"], "--sample is the shape of x"),
        (["FILE:Attention", "--args", "14", "6", "--scale", "x"], "invalid float value"),
    ],
)
def test_what_cannot_be_examined_is_one_line_and_exit_code_2(arguments, says, file, capsys):
    code, _, err = ended([one.replace("FILE", str(file)) for one in arguments], capsys)
    assert code == 2
    assert says in err
    assert err.startswith("regard examine: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("broken", ["1 / 0", "raise SystemExit(3)", "def f(:", "import beside.nothing"])
def test_a_file_that_cannot_be_run_is_one_line(broken, file, capsys):
    file.write_text(broken)
    code, _, err = ended([f"{file}:Attention"], capsys)
    assert code == 2
    assert "could not be run" in err
    assert err.count("\n") == 1


def test_the_same_weights_are_drawn_each_time(file, capsys):
    first = ended([f"{file}:Leaking", "--args", 14, 6], capsys)
    torch.manual_seed(0)
    assert ended([f"{file}:Leaking", "--args", 14, 6], capsys) == first


def test_a_module_that_was_imported_under_the_same_name_stays(file, capsys, monkeypatch):
    path = file.with_name("json.py")
    path.write_text(file.read_text())
    assert ended([f"{path}:Attention", "--args", 14, 6], capsys)[0] == 0
    assert sys.modules["json"] is json


def test_help_says_that_code_is_run(capsys):
    with pytest.raises(SystemExit):
        main(["examine", "--help"])
    assert "It runs the code of the file or package" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_command_runs_as_a_program_of_its_own(file):
    command = [sys.executable, "-W", "error", "-m", "regard", "examine", f"{file}:Leaking", "--args", "14", "6"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "future leak" in done.stdout
    assert done.stderr == ""
