"""A run killed at any moment, and gone on with, is the run that never was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.train import TrainConfig, begin
from regard.train.listeners.lines import read
from train import small

NURSERY = Path(__file__).with_name("nursery.py")
KILLS = 20


def config(folder: Path, name: str, learns: str) -> TrainConfig:
    settings = {"out": str(folder / name), "steps": 260, "accumulate": 2, "evaluate_every": 7, "warmup": 9}
    settings |= {"checkpoint_every": 3, "sample_every": 50, "learning_rate": 0.01}
    if learns == "gpt2":
        return small.config(folder, **settings, dropout=0.2)
    return small.translation(folder, learns, **settings, model={"dropout": 0.2})


def nursed(folder: Path, name: str, learns: str, kills: int) -> dict:
    one = config(folder, name, learns)
    (folder / f"{name}.json").write_text(json.dumps(one.table()))
    command = [sys.executable, "-W", "error", NURSERY, folder / f"{name}.json", str(kills), "7"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return {**json.loads(ran.stdout), "config": one}


@pytest.mark.slow
@pytest.mark.parametrize("learns", ["gpt2", "transformer", "additive"])
def test_twenty_kills_change_no_bit(tmp_path, learns):
    small.corpus(tmp_path)
    small.pairs(tmp_path)
    whole, killed = nursed(tmp_path, "whole", learns, 0), nursed(tmp_path, "killed", learns, KILLS)
    assert (whole["code"], killed["code"], killed["kills"]) == (0, 0, KILLS)
    assert killed["half"] >= KILLS // 4  # these fell into a write
    one, other = (
        [{name: value for name, value in row.items() if name != "seconds"} for row in read(tmp_path / name / "log.jsonl")]
        for name in ("whole", "killed")
    )
    assert len(one) == 260
    assert one == other
    for file in ("model/model.safetensors", "last/model.safetensors"):
        files = [tmp_path / name / file for name in ("whole", "killed")]
        assert len({file.is_file() for file in files}) == 1
        assert not files[0].is_file() or files[0].read_bytes() == files[1].read_bytes()
    ends = [begin(each["config"]) for each in (whole, killed)]
    assert [end.step for end in ends] == [260, 260]
    for a, b in zip(*(end.model.state_dict().values() for end in ends), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(*(end.optimiser.state.values() for end in ends), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
