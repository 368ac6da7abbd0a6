"""The lectures' own exercises in training, on their own texts."""

from pathlib import Path

import pytest

from regard.cli import main
from regard.models import GPT2Config
from regard.train import TrainConfig, run
from regard.train.listeners.lines import LOG, Log, read

ROOT = Path(__file__).parents[2]
TEXTS = ROOT.parent / "shared" / "data" / "text"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TEXTS.is_dir(), reason="needs ../shared/data, which is not here"),
]


def test_a_character_model_of_shakespeare_learns_what_the_small_setting_can(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = str(TEXTS / "tinyshakespeare.txt")
    assert main(["train", "--config", str(ROOT / "recipes" / "shakespeare.toml"), "--text", text, "--sample-every", "0"]) == 0
    log = read(Path("runs/shakespeare") / LOG)
    assert min(row["held_out_nats"] for row in log if row.get("held_out_nats") is not None) <= 1.80
    assert len(log) == 2000


def test_a_model_of_124_million_parameters_learns_the_verdict_by_heart_in_a_few_steps(tmp_path):
    text = tmp_path / "verdict.txt"
    text.write_text((TEXTS / "the-verdict.txt").read_text(encoding="utf-8")[:2000], encoding="utf-8")
    small = GPT2Config.small()
    config = TrainConfig(
        text=str(text),
        vocabulary="gpt2",
        out=str(tmp_path / "run"),
        held_out=0.0,
        model=GPT2Config(layers=small.layers, heads=small.heads, width=small.width, context=128, vocabulary=small.vocabulary),
        steps=40,
        batch=4,
        learning_rate=6e-4,
        warmup=5,
        precision="bfloat16",
        checkpoint_every=0,
    )
    run(config, [Log(tmp_path / LOG)])
    losses = [row["loss_nats"] for row in read(tmp_path / LOG)]
    assert losses[0] > 10  # at first it knows nothing: log 50257 is 10.8
    assert losses[-1] < 1
