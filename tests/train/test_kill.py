"""A run killed at any moment, and gone on with, is the run that never was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.train import TrainConfig, begin
from regard.train.listeners.json_lines import read_rows
from train import small_runs

FORK_SERVER = Path(__file__).with_name("fork_server.py")
RUNS = [("gpt2", 4), ("transformer", 4), ("additive", 4)]  # of the four moments of the server the same share
STEPS = 13  # a kill, which the run must outlast


def config(folder: Path, name: str, learns: str, kills: int) -> TrainConfig:
    settings = {"out": str(folder / name), "steps": STEPS * kills, "accumulate": 2, "evaluate_every": 7, "warmup": 9}
    settings |= {"checkpoint_every": 3, "sample_every": 50, "learning_rate": 0.01}
    if learns == "gpt2":
        return small_runs.config(folder, **settings, dropout=0.2)
    return small_runs.translation(folder, learns, **settings, model={"dropout": 0.2})


def train_under_kills(folder: Path, one: TrainConfig, kills: int) -> dict:
    name = Path(one.out).name
    (folder / f"{name}.json").write_text(json.dumps(one.to_table()))
    command = [sys.executable, "-W", "error", FORK_SERVER, folder / f"{name}.json", str(kills), "7"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    return {**json.loads(ran.stdout), "config": one}


@pytest.mark.slow
@pytest.mark.parametrize(("learns", "kills"), RUNS)
def test_kills_at_any_moment_change_no_bit(tmp_path, learns, kills):
    small_runs.corpus(tmp_path)
    small_runs.pairs(tmp_path)
    names, steps = ("whole", "killed"), STEPS * kills
    configs = [config(tmp_path, name, learns, kills) for name in names]
    whole, killed = (train_under_kills(tmp_path, one, count) for one, count in zip(configs, (0, kills), strict=True))
    assert (whole["code"], killed["code"], killed["kills"]) == (0, 0, kills)
    assert killed["half"] >= kills // 4  # these fell into a write
    one, other = (
        [{name: value for name, value in row.items() if name != "seconds"} for row in read_rows(tmp_path / name / "log.jsonl")]
        for name in names
    )
    assert len(one) == steps
    assert one == other
    for file in ("model/model.safetensors", "last/model.safetensors"):
        files = [tmp_path / name / file for name in names]
        assert len({file.is_file() for file in files}) == 1
        assert not files[0].is_file() or files[0].read_bytes() == files[1].read_bytes()
    ends = [begin(each["config"]) for each in (whole, killed)]
    assert [end.step for end in ends] == [steps, steps]
    for a, b in zip(*(end.model.state_dict().values() for end in ends), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(*(end.optimizer.state.values() for end in ends), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
