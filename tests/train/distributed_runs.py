"""Runs of several processes: torchrun starts this file, which trains a list of configs one after the other.

    torchrun --nproc-per-node=2 tests/train/distributed_runs.py CONFIGS.json

CONFIGS.json is a list of [config, {"timeout": seconds, "last": the step to stop after, "fault": what befalls the second process
in step 3: "error", SIGKILL or SIGSTOP, "float64": whether it computes in float64}]. The first process writes log.jsonl into
each run's folder, and beside it what the tests ask of a run, states.json: the bytes of its weights, gradients and moments, and
those it exchanged.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.errors import DataError, RegardError
from regard.train import Report, TrainConfig, Training, begin, follow
from regard.train.distributed import start_engine
from regard.train.listeners.json_lines import LOG_NAME, ReportLog
from regard.train.training_loop import accumulate_gradients


class Exchanges(TorchDispatchMode):
    """Counts what is handed to the process group, by operation: how often, and the bytes that one process holds whole."""

    def __init__(self):
        super().__init__()
        self.times, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if name.startswith("c10d."):
            self.times[name.split(".")[1]] += 1
            self.bytes[name.split(".")[1]] += max(x.nbytes for x in flat(args))
        return function(*args, **(kwargs or {}))


def flat(parts):
    """All tensors in nested lists."""
    for one in parts:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from flat(one)


def nbytes(tensors) -> int:
    """The bytes of memory under tensors, a part of it under two of them counted once."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local if x.numel()}.values())


def states(training: Training) -> dict:
    """The bytes of a run's weights, gradients and moments in this process, and what one step exchanges."""
    config = training.config
    batches = [training.reader.read(n) for n in range(config.accumulate)]
    with Exchanges() as exchanges:
        accumulate_gradients(training, 1, batches)
    parameters = list(training.wrapped_model.parameters())
    found = {"weights": nbytes(parameters), "gradients": nbytes(x.grad for x in parameters)}
    found["moments"] = nbytes(x for moments in training.optimizer.state.values() for x in moments.values())
    training.optimizer.zero_grad()
    return {**found, "times": exchanges.times, "bytes": exchanges.bytes}


def refuse(done: int, whole: int | None) -> None:
    """Hears of a text that is being prepared, where the first process should have done so."""
    raise DataError("the second process prepares the text too.")


class Fate:
    """A listener that stops a run, or has something befall the second process."""

    def __init__(self, last: int = 0, fault: str = "", timeout: int = 0) -> None:
        self.last, self.fault = last, fault

    def __call__(self, training: Training, report: Report) -> None:
        if report.step == self.last and not training.is_first_process:
            training.stop("the test")  # one process is told, and all stop
        if report.step == 3 and not training.is_first_process and self.fault == "error":
            raise DataError("the story is damaged.")
        if report.step == 3 and not training.is_first_process and self.fault:
            os.kill(os.getpid(), signal.Signals[self.fault])


def main() -> None:
    torch.set_num_threads(1)
    for table, asked in json.loads(Path(sys.argv[1]).read_text()):
        with start_engine(TrainConfig.from_table(table), asked.get("timeout", 60)) as engine:
            if asked.pop("float64", False):
                torch.set_default_dtype(torch.float64)  # of the model and of what its optimiser keeps
            training = begin(TrainConfig.from_table(table), engine, refuse if engine.rank else None)
            torch.set_default_dtype(torch.float32)
            follow(training, [ReportLog(training.folder / LOG_NAME), Fate(**asked)])
            found = states(training)
            if training.is_first_process:
                (training.folder / "states.json").write_text(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except RegardError as error:
        raise SystemExit(str(error)) from None
