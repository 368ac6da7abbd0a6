"""regard audit prints what policies drop, in words, as a table of any width, and as JSON."""

import json

import pytest

from regard.cli import main

TEXT = "Once upon a time there was a little cat. The cat had a red ball, and it liked to play with the red ball every day. " * 3


def run(capsys, *arguments):
    code = main(["audit", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 40])
def test_the_table_and_the_worst_rows_fit_the_window(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    policies = ("--policy", "snapkv:budget=0.5,window=8", "--policy", "h2o:budget=9")
    code, out, _ = run(capsys, TEXT, *policies, "--prompt", "50", "--run", "--worst", "1")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(out.split())
    assert "queries after a prompt of 50, in" in words
    assert "policy keys recall" in words
    assert "recall at query 0-" in words
    assert all(title in words for title in ("5 %", "least", "KL", "error", "loss", "change", "same", "stream"))
    assert "each keeps as many keys; recall differs by at most" in words
    assert "H2O(budget=9) keeps" in words
    assert "what it drops is on key" in words


@pytest.mark.slow
def test_the_numbers_are_json_and_a_figure_is_drawn(capsys, tmp_path):
    path, page = tmp_path / "recall.png", tmp_path / "audit.html"
    code, out, _ = run(
        capsys, TEXT, "--policy", "oracle:budget=5", "--json", "--run", "--certify", "3", "--figure", path, "--page", page
    )
    assert code == 0
    found = json.loads(out)
    assert [row["part"] for row in found["rows"]] == ["generated", "prompt"]
    assert found["rows"][0]["keys"] == 5
    assert found["certificate"]["rows"] == 6 * 6 * 3
    assert found["certificate"]["wrong_counts"] == 0
    assert found["certificate"]["recall"] < 1e-4
    assert set(found["downstream"][0]) == {"policy", "loss", "change", "kl", "agreement", "residual"}
    assert path.stat().st_size > 1000
    shown = page.read_text(encoding="utf-8")
    assert "<h2>Recall by position</h2>" in shown
    assert "certificate: of 108 rows computed anew in float64, each keeps as many keys" in shown


@pytest.mark.slow
def test_needles_of_each_kind_are_counted_with_each_policy(capsys):
    arguments = TEXT * 4, "--policy", "oracle:budget=5", "--needles", "2", "--certify", "1", "--worst", "0"
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    needles = json.loads(out)["needles"]
    assert list(needles) == ["tasks", "complete model", "Oracle(budget=5)"]
    assert list(needles["tasks"].values()) == [2] * 5
    assert all(needles["Oracle(budget=5)"][kind] <= n <= 2 for kind, n in needles["complete model"].items())
    code, out, _ = run(capsys, *arguments)
    words = " ".join(out.split())
    assert "answered single multi key multi value variables words" in words
    assert "tasks 2 2 2 2 2" in words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "h3o"), "there is no policy 'h3o'"),
        (("--policy", "h2o:budget=0"), "H2O(budget) must be"),
        (("--policy", "h2o", "--tokens", "1"), "--tokens must be at least 2"),
        (("--policy", "h2o", "--worst", "-1"), "--worst must be at least 0"),
        (("--policy", "h2o", "--needles", "-1"), "--needles must be at least 0"),
        (("--policy", "h2o", "--certify", "0"), "--certify must be at least 1"),
    ],
)
def test_what_cannot_be_used_is_said_before_the_model_is_loaded(capsys, arguments, says):
    code, _, errors = run(capsys, TEXT, *arguments)
    assert code == 2
    assert says in errors
