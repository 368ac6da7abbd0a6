import copy
import json
import os
import subprocess
import sys

import pytest

from regard.cli import main
from regard.lectures import printed_numbers
from regard.lectures.comparison import Verdict

pytestmark = pytest.mark.usefixtures("screen_of_80_columns")
NAMES = [example["id"] for example in printed_numbers.load_printed_numbers()["examples"]]


@pytest.fixture
def figures_with_a_misprint(monkeypatch):
    """The figures, one weight of 'simple-all' printed otherwise."""
    changed = copy.deepcopy(printed_numbers.load_printed_numbers())
    example = next(example for example in changed["examples"] if example["id"] == "simple-all")
    example["weights"][2][3] += 0.01
    monkeypatch.setattr(printed_numbers, "load_printed_numbers", lambda: changed)


def test_every_number_of_the_lectures_is_right_and_the_exit_code_says_so(capsys):
    assert main(["verify"]) == 0
    out, err = capsys.readouterr()
    assert "0 differ." in out
    assert "16 examples" in out
    assert err == ""


def test_a_number_that_is_off_turns_its_verdict_and_the_exit_code(figures_with_a_misprint, capsys):
    assert main(["verify"]) == 1
    out = capsys.readouterr().out
    assert Verdict.DIFFERS in out
    assert "weights by 0.01" in out
    assert "1 differs." in out


def test_the_leaky_mask_stands_beside_the_right_weights(capsys):
    assert main(["verify", "dog-leaky-mask"]) == 0
    out = capsys.readouterr().out
    assert Verdict.WRONG.split(",")[0] in out
    assert "WRONG" in out
    assert "as printed" in out
    assert "as they should be" in out
    leaky, right = (line.split()[1:] for line in two_halves(out, "The "))
    assert leaky == ["0.13", "0.22", "0.22", "0.22", "0.22"]
    assert right == ["1.00", "0", "0", "0", "0"]


def two_halves(out, word):
    """The two matrices' rows of a word, which share a line."""
    (line,) = (line for line in out.splitlines() if line.count(word) == 2 and "0.13" in line)
    middle = line.index(word, line.index(word) + 1)
    return line[:middle], line[middle:]


@pytest.mark.parametrize("columns", [40, 71, 72, 80, 119, 120, 200])
def test_no_screen_cuts_a_word_or_runs_over(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["verify"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    words = out.replace("(", " ").replace(")", " ").replace(",", " ").split()
    assert set(NAMES) <= {word.removesuffix(":") for word in words}
    assert {"weights_sum_normalised", "dot_of_token0_and_query", "scaled_and_masked", "misprint"} <= set(words)


@pytest.mark.parametrize("setting", [{}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_a_pipe_and_no_color_carry_no_escape_codes_and_no_trailing_blanks(setting, monkeypatch, capsys):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    main(["verify"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


def test_json_has_every_comparison_with_its_numbers(capsys):
    assert main(["verify", "--json"]) == 0
    record = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["ok"] is True
    assert list(dict.fromkeys(row["example"] for row in record["rows"])) == NAMES
    assert record["numbers"] == sum(count(part["printed"]) for row in record["rows"] for part in row["compared"])
    leaky, right = (row for row in record["rows"] if row["example"] == "dog-leaky-mask")
    assert (leaky["verdict"], right["verdict"]) == (Verdict.WRONG, Verdict.AGREES)
    assert right["compared"][0]["printed"] == printed_numbers.get_printed_example("dog-leaky-mask")["correct_weights"]
    masked = next(row for row in record["rows"] if row["example"] == "causal-minus-infinity")["compared"][0]
    assert masked["printed"] == printed_numbers.get_printed_example("causal-minus-infinity")["masked"]
    assert (
        masked["computed"][0] == [pytest.approx(0.9231, abs=printed_numbers.load_printed_numbers()["tolerance"])] + ["-inf"] * 5
    )


def count(numbers):
    return sum(map(count, numbers)) if isinstance(numbers, list) else 1


def test_an_unknown_example_is_one_line_on_stderr_and_exit_code_2(capsys):
    assert main(["verify", "simple-al"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("regard verify: there is no example 'simple-al'. Did you mean simple-all?")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_command_runs_as_a_program_of_its_own():
    environment = {**os.environ, "COLUMNS": "40"}
    command = [sys.executable, "-W", "error", "-m", "regard", "verify", "softmax-211"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("softmax-211: agrees\n")
    assert done.stdout.endswith("7 numbers of 1 example computed again.\nOf 1 row 1 agrees; 0 differ.\n")
    assert done.stderr == ""
