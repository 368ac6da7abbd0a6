import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bounds import assert_within, estimate_rounding
from regard import MultiHeadAttention
from regard.cli import main
from regard.cli.walk_screen import summarize_example as summarize
from regard.lectures.examples import EXAMPLES, summarize_example
from regard.lectures.printed_numbers import load_sentence
from regard.models.recurrent import RecurrentTranslator
from regard.models.transformer import Transformer
from regard.text import BytePair

pytestmark = pytest.mark.usefixtures("screen_of_80_columns")


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
def get_error_line(capsys):
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
        "‘journey’ attends most to ‘journey’ (0.24), least to ‘one’ (0.11).",
        "4  context = weights x",
    ):
        assert expected in shown
    assert shown.rstrip().splitlines()[-2].startswith("Next: regard walk --query journey")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_shown_and_listed_and_written_as_strict_json(walk, name):
    assert f"\n{name} " in "\n" + walk("--list")
    assert "\x1b" not in walk("--example", name)
    assert record(walk("--example", name, "--json"))["example"] == name


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_file_of_screens_is_what_the_examples_give(walk, monkeypatch, name):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "97")
    from_file = walk("--example", name)
    monkeypatch.setattr("regard.cli.walk.COMPUTED", ("example",))
    assert walk("--example", name) == from_file, "python -m docs.screens writes it anew"
    assert summarize_example(name) == summarize(name)


def test_the_leak_is_called_wrong_and_the_right_weights_stand_beside_it(walk, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = walk("--example", "leak")
    assert "This mask is WRONG" in shown
    row = next(line for line in shown.splitlines() if "0.2167" in line)
    assert row.split() == ["The", "0.1334", *["0.2167"] * 4, "The", "1.0000", "0", "0", "0", "0"]
    assert "right weights" in walk("--example", "leak", "--query", "dog")


def test_bad_input_is_one_line(get_error_line, tmp_path):
    assert "Did you mean causal?" in get_error_line("--example", "causl")
    assert "at least one word" in get_error_line("--words", "  ")
    assert "--rows must be at least 1" in get_error_line("--rows", "0")
    assert "--heads must be at least 1" in get_error_line("--words", "a", "--heads", "0")
    assert "invalid int value" in get_error_line("--words", "a", "--heads", "two")
    assert "is not a rule" in get_error_line("--words", "a", "--mask", "diagonal")
    assert "leave out --words" in get_error_line("--example", "simple", "--words", "a")
    assert "--seed" in get_error_line("--seed", "3")
    assert "2^63" in get_error_line("--words", "a", "--seed", "-1")
    assert "No such file" in get_error_line("--words", "a", "--vectors", str(tmp_path / "none.npy"))
    np.save(tmp_path / "v.npy", np.ones((3, 2)))
    assert "there are 2 words" in get_error_line("--words", "a b", "--vectors", str(tmp_path / "v.npy"))
    assert "no W_query" in get_error_line("--weights", str(tmp_path / "v.npy"))
    assert "cannot be split evenly" in get_error_line(
        "--weights", weights_of(tmp_path, MultiHeadAttention(3, 4, 6, 0.0, 2)), "--heads", "3"
    )


def weights_of(folder, layer):
    """A file with the state dict of a layer."""
    path = folder / "w.safetensors"
    save_file({**layer.state_dict(), "mask": torch.ones(6, 6)}, path)
    return str(path)


def test_a_layers_own_weights_give_its_own_output(walk, tmp_path):
    torch.manual_seed(0)
    layer = MultiHeadAttention(3, 4, 6, 0.0, 2)
    path = weights_of(tmp_path, layer)
    found = record(walk("--weights", path, "--heads", "2", "--json"))
    assert found["scenes"][-1]["name"] == "output"
    output = tensor(found["scenes"][-1]["panels"][0]["values"])
    x = load_sentence("journey")[1].double()
    with torch.no_grad():
        allowed = estimate_rounding(layer.double(), lambda one: one(x), terms=len(x))
        assert_within(output, layer(x), allowed)
    assert any("causal mask" in note for note in found["notes"])
    unmasked = record(walk("--weights", path, "--heads", "2", "--mask", "none", "--json"))
    assert unmasked["steps"]["masked"] == unmasked["steps"]["scaled"]


@pytest.mark.slow
def test_a_long_sentence_shows_a_window_that_can_be_moved(walk):
    words = " ".join(f"w{n}" for n in range(1, 201))
    shown = walk("--words", words)
    assert "Words 0 to 11 of 200: --from 12 moves on, --rows N shows more." in shown
    assert "11 w12 " in shown
    assert "12 w13" not in shown
    moved = walk("--words", words, "--from", "w150", "--rows", "3")
    assert "Words 149 to 151 of 200" in moved
    assert "149 w150" in moved
    assert moved == walk("--words", words, "--from", "149", "--rows", "3")
    assert "150 to 161" in walk("--words", words, "--query", "w162")
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


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """Folders of small random translators, by what their attention is."""
    torch.manual_seed(5)
    text = BytePair.train(["a man rides a horse", "un homme monte un cheval"] * 3, 286)
    models = {
        "additive": RecurrentTranslator("additive", vocabulary=286, width=8, hidden=9),
        "wide": RecurrentTranslator("additive", vocabulary=286, width=8, hidden=67, layers=2),
        "plain": RecurrentTranslator(vocabulary=286, width=8, hidden=9),
        "transformer": Transformer(vocabulary=286, width=12, heads=3, layers=1),
    }
    place = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.text = text
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4)
        model.save(place / name)
    return {name: str(place / name) for name in models}


def test_a_trained_translator_is_shown_with_both_sentences_and_a_row_written_out(walk, speaking):
    asked = ("--model", speaking["additive"], "--words", "a man rides a horse")
    told = walk(*asked, "--rows", "6")
    assert "Additive attention of a trained translator" in told
    assert "a man rides a horse ⟨end⟩ → " in told.replace("\n", " ")
    assert "4  scores = weightᵀ tanh(q + k)" in told
    shown = walk(*asked, "--query", "0")
    assert shown.count("·tanh(") == 6 * 8  # of each of the six tokens, and of each the first terms of a sum
    raised = [line.split()[0] for line in shown.splitlines() if " e^(" in line]
    assert raised[1:] == ["a", "man", "rides", "a", "horse", "⟨end⟩"]
