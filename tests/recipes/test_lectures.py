"""The lectures' own exercises in training, on their own texts."""

from pathlib import Path

import pytest
import torch

from regard.cli import main
from regard.models import GPT2Config
from regard.train import TrainConfig, run
from regard.train.listeners.json_lines import LOG_NAME, ReportLog, read_rows

ROOT = Path(__file__).parents[2]
TEXTS = ROOT.parent / "shared" / "data" / "text"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TEXTS.is_dir(), reason="needs ../shared/data, which is not here"),
]


def measure_pairs_of_letters(text: str, held_out: float) -> float:
    """Nats a letter, on the end of a text, of the letter before alone: how often each followed it, one added to each count."""
    letters = {letter: n for n, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[letter] for letter in text])
    count = len(letters)
    first = round(len(numbers) * (1 - held_out))
    follows = torch.bincount(numbers[: first - 1] * count + numbers[1:first], minlength=count**2).reshape(count, count) + 1.0
    chances = follows / follows.sum(1, keepdim=True)
    return -float(chances[numbers[first:-1], numbers[first + 1 :]].log().mean())


def test_a_character_model_of_shakespeare_soon_knows_more_than_pairs_of_letters(tmp_path, monkeypatch):
    """The recipe in a fifth of its 2,000 steps."""
    monkeypatch.chdir(tmp_path)
    text = TEXTS / "tinyshakespeare.txt"
    recipe = str(ROOT / "recipes" / "shakespeare.toml")
    given = ["--steps", "400", "--evaluate-every", "400", "--sample-every", "0"]
    assert main(["train", "--config", recipe, "--text", str(text), *given]) == 0
    log = read_rows(Path("runs/shakespeare") / LOG_NAME)
    pairs = measure_pairs_of_letters(text.read_text(encoding="utf-8"), 0.1)
    assert 2.4 < pairs < 2.6
    assert log[-1]["held_out_nats"] < pairs - 0.15
    assert len(log) == 400


def test_a_model_of_124_million_parameters_learns_some_words_of_the_verdict_by_heart(tmp_path):
    text = tmp_path / "verdict.txt"
    text.write_text((TEXTS / "the-verdict.txt").read_text(encoding="utf-8")[:400], encoding="utf-8")
    small = GPT2Config.small()
    config = TrainConfig(
        text=str(text),
        vocabulary="gpt2",
        out=str(tmp_path / "run"),
        held_out=0.0,
        model=GPT2Config(layers=small.layers, heads=small.heads, width=small.width, context=32, vocabulary=small.vocabulary),
        steps=24,
        batch=4,
        learning_rate=6e-4,
        warmup=5,
        checkpoint_every=0,
    )
    run(config, [ReportLog(tmp_path / LOG_NAME)])
    losses = [row["loss_nats"] for row in read_rows(tmp_path / LOG_NAME)]
    assert losses[0] > 10  # at first it knows nothing: log 50257 is 10.8
    assert losses[-1] < 1
