import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from regard import Causal, ConfigError, Everything, MultiHeadAttention, Prefix, Window, attend
from regard.cli import main
from regard.cli.own_words import rule
from regard.lectures.examples import EXAMPLES
from regard.lectures.figures import sentence


@pytest.fixture(autouse=True)
def screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def walk(capsys):
    def run(*arguments):
        """What `regard walk` prints."""
        assert main(["walk", *arguments]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        return shown.out

    return run


@pytest.fixture
def refused(capsys):
    def run(*arguments):
        """The one line that `regard walk` gives on bad input."""
        try:
            code = main(["walk", *arguments])
        except SystemExit as left:
            code = left.code
        shown = capsys.readouterr()
        assert code == 2
        assert shown.out == ""
        assert shown.err.startswith("regard walk: ")
        assert shown.err.count("\n") == 1
        return shown.err

    return run


def record(text):
    """The JSON, which must be strict."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def tensor(values):
    """Numbers of the JSON; a string stands for what JSON cannot hold."""
    return torch.from_numpy(np.array(values).astype(np.float32))


def test_the_first_lecture_is_shown_step_by_step(walk):
    shown = walk()
    for expected in (
        "Your journey starts with one step",
        "2  scores = x xᵀ",
        "3  weights = softmax(scores)",
        "journey  0.1385   0.2379  0.2333  0.1240  0.1082  0.1581",
        "journey attends most to journey (0.24), least to one (0.11).",
        "4  context = weights x",
    ):
        assert expected in shown
    assert shown.rstrip().splitlines()[-2].startswith("Next: regard walk --query journey")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_shown_and_listed_and_written_as_strict_json(walk, name):
    assert f"\n{name} " in "\n" + walk("--list")
    assert "\x1b" not in walk("--example", name)
    assert record(walk("--example", name, "--json"))["example"] == name


def test_the_json_holds_every_step_and_gives_each_float32_back(walk):
    found = record(walk("--example", "causal", "--json"))
    q, k, v = (tensor(found[name]) for name in "qkv")
    for name, step in attend(q, k, v, Causal()).items():
        torch.testing.assert_close(tensor(found["steps"][name]), step, rtol=1e-6, atol=1e-6)
    assert found["steps"]["masked"][0][1] == "-inf"
    assert record(walk("--example", "softmax", "--json"))["scenes"][2]["panels"][0]["values"][1][0] == "nan"
    x = record(walk("--json"))["q"]
    assert torch.equal(tensor(x), sentence("journey")[1])
    assert x[0] == [0.43, 0.15, 0.89]


def test_a_query_is_written_out_by_its_word_or_its_number(walk):
    shown = walk("--query", "journey")
    assert "0.55·0.43 + 0.87·0.15 + 0.66·0.89 = 0.2365 + 0.1305 + 0.5874 = 0.9544" in shown
    assert "e^(0.9544 - 1.495) = 0.5824" in shown
    assert "0.5824 / 4.2036 = 0.1385" in shown
    assert "= 0.4419" in shown
    assert walk("--query", "2") == shown == walk("--query", "@2")
    assert record(walk("--query", "2", "--json"))["arithmetic"][0]["lines"][0]["label"] == "Your"


def test_the_leak_is_called_wrong_and_the_right_weights_stand_beside_it(walk, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = walk("--example", "leak")
    assert "This mask is WRONG" in shown
    row = next(line for line in shown.splitlines() if "0.2167" in line)
    assert row.split() == ["The", "0.1334", *["0.2167"] * 4, "The", "1.0000", "0", "0", "0", "0"]
    assert "right weights" in walk("--example", "leak", "--query", "dog")


def test_words_that_cannot_be_found_are_told_how_to_be(refused):
    assert "stands 2 times in the sentence: say --query 1 or --query 3." in refused("--words", "a b a", "--query", "a")
    assert "say --query @2 or --query @3." in refused("--words", "3 1 1 2", "--query", "1")
    assert "is no word of the sentence: Your, journey, starts, with, one, step." in refused("--query", "zebra")
    assert "numbered from 1 to 6" in refused("--query", "7")
    assert "numbered from 1 to 6" in refused("--query", "0")
    assert "attends to no sentence" in refused("--example", "scale", "--query", "a")


def test_bad_input_is_one_line(refused, tmp_path):
    assert "Did you mean causal?" in refused("--example", "causl")
    assert "at least one word" in refused("--words", "  ")
    assert "--rows must be at least 1" in refused("--rows", "0")
    assert "--heads must be at least 1" in refused("--words", "a", "--heads", "0")
    assert "invalid int value" in refused("--words", "a", "--heads", "two")
    assert "is no rule" in refused("--words", "a", "--mask", "diagonal")
    assert "leave out --words" in refused("--example", "simple", "--words", "a")
    assert "--seed" in refused("--seed", "3")
    assert "2^63" in refused("--words", "a", "--seed", "-1")
    assert "No such file" in refused("--words", "a", "--vectors", str(tmp_path / "none.npy"))
    np.save(tmp_path / "v.npy", np.ones((3, 2)))
    assert "there are 2 words" in refused("--words", "a b", "--vectors", str(tmp_path / "v.npy"))
    assert "no W_query" in refused("--weights", str(tmp_path / "v.npy"))
    assert "cannot share" in refused("--weights", weights_of(tmp_path, MultiHeadAttention(3, 4, 6, 0.0, 2)), "--heads", "3")


def weights_of(folder, layer):
    """A file with the state dict of a layer."""
    path = folder / "w.safetensors"
    save_file({**layer.state_dict(), "mask": torch.ones(6, 6)}, path)
    return str(path)


def test_random_vectors_are_said_to_be_random_and_follow_the_seed(walk):
    shown = walk("--words", "the cat sleeps")
    assert "The vectors are random (seed 123), 3 numbers a word." in shown
    assert "W_query" not in shown
    assert walk("--words", "the cat sleeps", "--seed", "123") == shown
    assert walk("--words", "the cat sleeps", "--seed", "5") != shown
    assert "W_query, W_key and W_value are random (seed 123)" in walk("--words", "the cat sleeps", "--heads", "2")


def test_given_vectors_are_used_and_missing_ones_are_named(walk, tmp_path):
    np.save(tmp_path / "v.npy", np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert record(walk("--words", "a b", "--vectors", str(tmp_path / "v.npy"), "--json"))["q"] == [[1, 2], [3, 4]]
    (tmp_path / "v.csv").write_text("cat,1,2\nthe,3,4\n", encoding="utf-8")
    shown = record(walk("--words", "the cat sleeps", "--vectors", str(tmp_path / "v.csv"), "--json"))
    assert shown["q"][:2] == [[3, 4], [1, 2]]
    assert "It has none for sleeps: random there (seed 123)." in shown["notes"]
    assert record(walk("--vectors", str(tmp_path / "v.csv"), "--json"))["words"] == ["cat", "the"]


def test_a_layers_own_weights_give_its_own_output(walk, tmp_path):
    torch.manual_seed(0)
    layer = MultiHeadAttention(3, 4, 6, 0.0, 2)
    path = weights_of(tmp_path, layer)
    found = record(walk("--weights", path, "--heads", "2", "--json"))
    assert found["scenes"][-1]["name"] == "output"
    output = tensor(found["scenes"][-1]["panels"][0]["values"])
    torch.testing.assert_close(output, layer(sentence("journey")[1]).detach())
    assert any("causal mask" in note for note in found["notes"])
    unmasked = record(walk("--weights", path, "--heads", "2", "--mask", "none", "--json"))
    assert unmasked["steps"]["masked"] == unmasked["steps"]["scaled"]


def test_masks_are_joined_as_in_python():
    assert rule("none") == Everything()
    assert rule("window:2") == Window(2)
    assert rule("causal & window:2,0 | prefix:3") == Causal() & Window(2, 0) | Prefix(3)
    for text in ("", "causal|", "window:", "window:-1", "prefix:x", "causal,none"):
        with pytest.raises(ConfigError):
            rule(text)


def test_a_long_sentence_shows_a_window_that_can_be_moved(walk):
    words = " ".join(f"w{n}" for n in range(1, 201))
    shown = walk("--words", words)
    assert "Words 1 to 12 of 200: --from 13 moves on, --rows N shows more." in shown
    assert "12 w12 " in shown
    assert "13 w13" not in shown
    moved = walk("--words", words, "--from", "w150", "--rows", "3")
    assert "Words 150 to 152 of 200" in moved
    assert "150 w150" in moved
    assert moved == walk("--words", words, "--from", "150", "--rows", "3")
    assert "151 to 162" in walk("--words", words, "--query", "w162")
    assert len(record(walk("--words", words, "--json"))["steps"]["weights"]) == 200


def test_hostile_words_are_shown_and_not_obeyed(walk):
    words = "\x1b[31mred [bold]x[/bold] \udc80 日本"
    shown = walk("--words", words)
    assert "\\x1b[31mred" in shown
    assert "[bold]x[/bold]" in shown
    assert record(walk("--words", words, "--json"))["words"] == words.split()
    assert "\x1b" not in shown


@pytest.mark.slow
def test_a_reader_that_leaves_and_a_terminal_without_unicode_meet_no_traceback():
    command = [sys.executable, "-m", "regard", "walk"]
    ascii_only = subprocess.run(command, capture_output=True, env={"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}, check=True)
    assert b"scores = x x?" in ascii_only.stdout
    assert ascii_only.stderr == b""
    script = f'set -o pipefail; "{sys.executable}" -m regard walk | head -1'
    head = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert head.stdout == b"Self-attention with nothing to train\n"
    assert head.stderr == b""
