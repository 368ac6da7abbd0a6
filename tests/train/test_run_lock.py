import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regard import ConfigError
from regard.train import begin, loop, run
from regard.train.listeners.json_lines import read_rows
from regard.train.run_lock import describe_holder
from train import small_runs

TRAINS = """
import json, sys
from pathlib import Path
from regard.train import TrainConfig, run
from regard.train.listeners.json_lines import ReportLog
config = TrainConfig.from_table(json.loads(sys.argv[1]))
run(config, [ReportLog(Path(config.out) / "log.jsonl"), lambda training, report: print(report.step, flush=True)])
"""


def config(tmp_path, **settings):
    small_runs.corpus(tmp_path)
    return small_runs.config(tmp_path, **{"evaluate_every": 0, "checkpoint_every": 5, **settings})


def start(one) -> subprocess.Popen:
    """A process that trains, and has done a step."""
    command = [sys.executable, "-W", "error", "-c", TRAINS, json.dumps(one.to_table())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout.readline() != "", "it ended before its first step"
    return process


@pytest.mark.slow
def test_a_second_process_is_refused_by_a_sentence_that_names_the_first_and_changes_nothing(tmp_path):
    one = config(tmp_path, steps=10**6)
    with start(one) as first:
        half = tmp_path / "run" / "checkpoints" / ".step-00999999"  # as if it were being written
        half.mkdir(parents=True, exist_ok=True)
        says = rf"run is in use: process {first.pid} on {platform.node()} trains in it"
        with pytest.raises(ConfigError, match=says):
            next(loop(begin(one)))
        assert half.is_dir()
        first.send_signal(signal.SIGKILL)
    rows = [row["step"] for row in read_rows(Path(one.out) / "log.jsonl")]
    assert rows == [*range(1, len(rows) + 1)]


@pytest.mark.slow
def test_a_process_that_was_killed_leaves_no_lock(tmp_path):
    one = config(tmp_path, steps=10**6)
    with start(one) as first:
        first.send_signal(signal.SIGKILL)
    training = begin(one)
    assert training.folder.is_dir()
    assert describe_holder(Path(one.out)) == f"process {os.getpid()} on {platform.node()}"


@pytest.mark.slow
def test_two_loops_of_one_process_are_refused_and_a_run_that_is_begun_twice_is_not(tmp_path):
    one = config(tmp_path)
    first, second = begin(one), begin(one)
    steps = loop(first)
    next(steps)
    with pytest.raises(ConfigError, match="this process trains in it already"):
        next(loop(second))
    with pytest.raises(ConfigError, match="this process trains in it already"):
        begin(one)
    steps.close()
    assert begin(one).step == 0


@pytest.mark.slow
def test_a_run_that_is_done_leaves_the_folder_to_others(tmp_path):
    one = config(tmp_path, steps=2)
    training = run(one)
    with start(small_runs.config(tmp_path, steps=3)) as other:
        pass
    assert other.returncode == 0
    assert training.step == 2


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="a run needs either corpus"):
        begin(small_runs.config(tmp_path, corpus=""))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="a run needs either corpus"):
        begin(small_runs.config(tmp_path, corpus=""))
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", [None, "", "[1]", '{"pid": "x", "host": 1}', "[" * 100_000])
def test_a_holder_that_does_not_say_who_it_is_is_another_process(tmp_path, content):
    if content is not None:
        (tmp_path / ".process").write_text(content)
    assert describe_holder(tmp_path) == "another process"
