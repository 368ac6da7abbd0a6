"""Runs of two processes or more, which train a list of configs one after the other.

The processes are forked by a server that has imported everything. Each run has a port of its own: the process that is done
with a run first would join the first process there while it ends.

A run is (config, {"timeout": seconds, "last": the step to stop after, "fault": what befalls the second process in step 3:
"error", SIGKILL or SIGSTOP, "float64": whether it computes in float64, "states": whether states.json is written}). The first
process writes log.jsonl into each run's folder, and beside it states.json: the bytes of its weights, gradients and moments, and
those that one step exchanges.
"""

import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import torch
import torch._dynamo  # with the next three: imported by a first step, here once for all processes
import torch.distributed.checkpoint.state_dict
import torch.distributed.checkpoint.state_dict_saver
import torch.distributed.fsdp
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import describe_rank, find_free_ports
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


def measure_states(training: Training) -> dict:
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

    def __init__(self, last: int = 0, fault: str = "") -> None:
        self.last, self.fault = last, fault

    def __call__(self, training: Training, report: Report) -> None:
        if report.step == self.last and not training.is_first_process:
            training.stop("the test")  # one process is told, and all stop
        if report.step == 3 and not training.is_first_process and self.fault == "error":
            raise DataError("the story is damaged.")
        if report.step == 3 and not training.is_first_process and self.fault:
            os.kill(os.getpid(), signal.Signals[self.fault])


def train_as_rank(runs: list, environments: list[dict[str, str]], errors: Path, warn: str) -> None:
    """Train a list of runs in a forked process, which writes to a file what it would write to stderr."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    warnings.simplefilter(warn)
    torch.set_num_threads(1)
    try:
        for environment, (config, asked) in zip(environments, runs, strict=True):
            os.environ.update(environment)
            train_together(config, **asked)
    except RegardError as error:
        raise SystemExit(str(error)) from None


def train_together(config: TrainConfig, timeout: int = 60, float64: bool = False, states: bool = False, **fate) -> None:
    """Train one run in this process and the other, with the engine of its config."""
    with start_engine(config, timeout) as engine:
        if float64:
            torch.set_default_dtype(torch.float64)  # of the model and of what its optimiser keeps
        training = begin(config, engine, refuse if engine.rank else None)
        torch.set_default_dtype(torch.float32)
        follow(training, [ReportLog(training.folder / LOG_NAME), Fate(**fate)])
        if states:
            found = measure_states(training)
            if training.is_first_process:
                (training.folder / "states.json").write_text(json.dumps(found))


class RankProcess:
    """One of the processes, and the file of what it writes to stderr."""

    def __init__(self, runs: list, environments: list[dict[str, str]], errors: Path, warn: str) -> None:
        self.errors = errors
        start = multiprocessing.get_context("forkserver").Process
        self.process = start(target=train_as_rank, args=(runs, environments, errors, warn), daemon=True)
        self.process.start()

    def wait(self, timeout: int) -> tuple[int, str]:
        """Return the exit code of the process and what it wrote; fail if it has not ended in time."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"the process has not ended after {timeout} seconds"
        return self.process.exitcode, self.errors.read_text()

    def kill(self) -> None:
        """End the process if it has not ended."""
        self.process.kill()
        self.process.join()


def train_in_processes(folder: Path, runs: list, world: int = 2, warn: str = "error") -> None:
    """Train in processes, which must end well, and warn of nothing by default; if one does not, none is left behind."""
    processes = start_processes(folder, runs, world, warn)
    try:
        for process in processes:
            code, err = process.wait(600)
            assert code == 0, err
            assert warn != "error" or err == ""
    finally:
        for process in processes:
            process.kill()


def start_processes(folder: Path, runs: list, world: int = 2, warn: str = "error") -> list[RankProcess]:
    """Start processes that train a list of runs."""
    start_server()
    ports, ranks = find_free_ports(len(runs)), []
    for rank in range(world):
        environments = [{**os.environ, **describe_rank(rank, port, world)} for port in ports]
        ranks.append(RankProcess(runs, environments, folder / f"errors-{rank}.txt", warn))
    return ranks


def start_server() -> None:
    """Start the server that forks the processes, which imports what they need, if it does not run yet."""
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONWARNINGS": "error",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # processes that compile would import torch again
    }
    with patch.dict(os.environ, environment):
        forkserver.set_forkserver_preload([__name__])
        forkserver.ensure_running()
