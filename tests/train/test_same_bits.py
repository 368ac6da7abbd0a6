"""What is promised of a run that goes on: the same bits where nothing has changed that they depend on, else to say what has."""

from pathlib import Path

import pytest
import torch

from regard.train import begin, follow, run
from regard.train.listeners.json_lines import LOG_NAME, ReportLog
from regard.train.resume import describe_computer
from train import small_runs
from train.distributed_runs import train_in_processes
from train.test_distributed import find_largest_difference, losses, weights

EIGHT = {"steps": 8, "batch": 6, "accumulate": 2, "learning_rate": 0.01, "checkpoint_every": 0, "evaluate_every": 4}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_the_same_number_of_processes_goes_on_with_the_same_bits(tmp_path, world):
    """In float32, with dropout: three numbers are summed in one order or another, two are not."""
    small_runs.corpus(tmp_path)
    runs = []
    for name in ("ddp", "fsdp"):
        whole, cut = (
            small_runs.config(tmp_path, **EIGHT, out=str(tmp_path / f"{name} {end}"), engine=name, dropout=0.3) for end in "ab"
        )
        runs += [(whole, {}), (cut, {"last": 3}), (cut, {})]
    train_in_processes(tmp_path, runs, world=world)
    for name in ("ddp", "fsdp"):
        assert len(losses(tmp_path, f"{name} a")) == 8
        assert torch.equal(losses(tmp_path, f"{name} a"), losses(tmp_path, f"{name} b"))
        assert find_largest_difference(weights(tmp_path, f"{name} a"), weights(tmp_path, f"{name} b")) == 0


@pytest.mark.slow
def test_another_number_of_processes_is_said_and_draws_other_dice(tmp_path):
    small_runs.corpus(tmp_path)
    one = small_runs.config(tmp_path, **EIGHT, out=str(tmp_path / "moved"), dropout=0.3)
    alone = small_runs.config(tmp_path, **EIGHT, out=str(tmp_path / "alone"), dropout=0.3)
    follow(begin(alone), [ReportLog(Path(alone.out) / LOG_NAME)])
    train_in_processes(tmp_path, [(one, {"last": 4})])
    training = begin(one)
    assert "processes 1 instead of 2" in training.changes
    assert "engine one process instead of ddp" in training.changes
    follow(training, [ReportLog(Path(one.out) / LOG_NAME)])
    away = (losses(tmp_path, "moved") - losses(tmp_path, "alone")).abs()
    assert 0 < float(away.max()) < 0.1  # a run of the same kind, and another one


@pytest.mark.slow
def test_a_run_that_goes_on_where_it_was_has_no_changes(tmp_path):
    small_runs.corpus(tmp_path)
    run(small_runs.config(tmp_path, steps=2))
    assert begin(small_runs.config(tmp_path, steps=3)).changes == []


@pytest.mark.slow
def test_what_the_bits_depend_on_is_said_where_it_changed(tmp_path):
    small_runs.corpus(tmp_path)
    run(small_runs.config(tmp_path, steps=2))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        training = begin(small_runs.config(tmp_path, steps=3))
        assert training.changes == [f"threads {threads + 1} instead of {threads}"]
        said = describe_computer(training.config, training.engine)
        assert {"torch", "processor", "device", "threads", "processes", "engine", "compile"} <= said.keys()
    finally:
        torch.set_num_threads(threads)
