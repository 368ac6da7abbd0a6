"""Runs that are killed: a process that has imported everything forks each of them, which costs no second a run.

python fork_server.py CONFIG KILLS SEED. CONFIG is a file of JSON. Half of the runs are killed while a checkpoint is being
written, half at other moments; the last is let live. Prints a JSON object: the kills, and how many of them
left half a checkpoint behind.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint.state_dict_saver

from regard.train import TrainConfig, run
from regard.train.listeners.json_lines import ReportLog

DEADLINE_SECONDS = 60


def born(config: TrainConfig) -> int:
    """A run in a process of its own."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run(config, [ReportLog(Path(config.out) / "log.jsonl")])
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def halves(config: TrainConfig) -> set[str]:
    """The checkpoints that are being written, or were when their process ended."""
    folder = Path(config.out) / "checkpoints"
    return {name for name in os.listdir(folder) if name.startswith(".step-")} if folder.is_dir() else set()


def steps(config: TrainConfig) -> set[str]:
    """The last step that was told."""
    log = Path(config.out) / "log.jsonl"
    return set(log.read_text().split("\n")[-2:-1]) if log.is_file() else set()


def run_and_kill(config: TrainConfig, events: Callable[[TrainConfig], set[str]], count: int, then_seconds: float) -> bool:
    """A run that is killed after so many new events, and a moment; False where it was done first."""
    before, seen = events(config), set()
    child, begun = born(config), time.monotonic()
    while time.monotonic() - begun < DEADLINE_SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, f"the run ended with {status}"
            return False
        time.sleep(0.0005)  # no write of a checkpoint is as short, and the run may need the core
        seen |= events(config) - before
        if len(seen) >= count:
            time.sleep(then_seconds)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the run hangs")


def main() -> None:
    torch.set_num_threads(1)  # threads do not outlive a fork
    config, dice = TrainConfig.from_table(json.loads(Path(sys.argv[1]).read_text())), random.Random(int(sys.argv[3]))
    kills = half = 0
    for n in range(int(sys.argv[2])):
        moments = (
            (steps, 0, dice.uniform(0, 0.5)),  # while it begins
            (halves, dice.randint(1, 3), dice.uniform(0, 0.003)),  # while it writes a checkpoint
            (steps, dice.randint(1, 20), dice.uniform(0, 0.03)),  # at any moment
            (halves, dice.randint(1, 3), 0.0),
        )
        if not run_and_kill(config, *moments[n % 4]):
            break
        kills += 1
        half += bool(halves(config))
    code = os.waitstatus_to_exitcode(os.waitpid(born(config), 0)[1])
    print(json.dumps({"kills": kills, "half": half, "code": code}))


if __name__ == "__main__":
    main()
