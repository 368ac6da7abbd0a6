"""Training: the state of a run between two steps, started from scratch or resumed from its last checkpoint."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.malloc import keep_freed_memory, trim_heap
from regard.train import checkpoints, optimizer
from regard.train.checkpoints import CheckpointManager
from regard.train.config import TrainConfig
from regard.train.loss_spikes import RunningLoss
from regard.train.memory_need import check_memory
from regard.train.resume import describe_computer, resume_training
from regard.train.run_lock import RunLock, lock_run
from regard.train.seeds import seed_generators
from regard.train.single_process import Engine, SingleProcess
from regard.train.task import Reader, Task
from regard.train.tasks import create_task


@dataclass(eq=False)
class Training:
    """The state of a run between two steps."""

    config: TrainConfig
    engine: Engine
    task: Task
    model: Any  # the unwrapped model: a GPT2, a translator
    wrapped_model: nn.Module  # the model as training calls it: wrapped or sharded
    optimizer: torch.optim.Optimizer
    reader: Reader
    held_out: Reader | None
    checkpoints: CheckpointManager
    lock: RunLock | None  # of the folder; held by the first process
    step: int = 0  # completed steps
    resumed: int = 0  # completed steps at the time of resuming
    changes: list[str] = field(default_factory=list)  # since the checkpoint, that may change the last bits
    running: RunningLoss = field(default_factory=RunningLoss)
    best: float | None = None  # the lowest held-out loss so far, in nats per token
    held_out_nats: float | None = None  # the held-out loss of the current step
    stopped: str = ""  # why the run ends before its last step

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out)

    @property
    def is_first_process(self) -> bool:
        """Whether this process is the first one, which writes files and prints."""
        return self.engine.rank == 0

    def hold_folder(self) -> AbstractContextManager[None]:
        """Return a context in which no other run may use the folder."""
        return nullcontext() if self.lock is None else self.lock.hold_for_training()

    def stop(self, why: str) -> None:
        """Stop the run after this step, with a checkpoint."""
        self.stopped = why

    def save(self) -> None:
        """Start writing a checkpoint; training may continue at once."""
        says = {"step": self.step, "best": self.best, "running": asdict(self.running), "config": self.config.to_table()}
        says |= {"held_out_nats": self.held_out_nats, "corpus": self.task.identify_data()}
        says["computed_by"] = describe_computer(self.config, self.engine)
        self.checkpoints.save(self.wrapped_model, self.optimizer, says)
        trim_heap()  # batches of many shapes fragment the memory that is kept

    def save_model(self, name: str) -> None:
        """Write the model into a folder of the run that its load function reads."""
        weights = self.engine.collect_state_dict(self.wrapped_model)
        if self.is_first_process:
            self.task.save_model(self.folder / name, self.model, weights)


def begin(
    config: TrainConfig, engine: Engine | None = None, progress: Callable[[int, int | None], None] | None = None
) -> Training:
    """Create the run of a config, resumed from its last checkpoint or started from scratch.

    Raises ConfigError for a config that would change the results of the run in its folder, and if another process trains in
    that folder; DataError for a damaged checkpoint.
    """
    engine = SingleProcess() if engine is None else engine
    check_memory(config, engine)  # before anything is written
    lock = None
    try:
        with engine.run_main_process_first():  # the first process may have a text to prepare
            lock = lock_run(Path(config.out)) if engine.rank == 0 else None
            subject = create_task(config, progress, is_first=engine.rank == 0)
        training = make_training(subject, engine, lock)
        resume_training(training)
    except BaseException:
        if lock is not None:
            lock.abandon()
        raise
    return training


def make_training(subject: Task, engine: Engine, lock: RunLock | None) -> Training:
    """Create a run before its first step, with its initial weights."""
    config = subject.config
    check_memory(config, engine, vocabulary=subject.text.vocabulary)
    reader, held_out = subject.make_readers(engine)
    with seed_generators(config.seed, 0, 0, engine.device):
        model = subject.make_model().to(engine.device)
    keep_freed_memory()
    called = engine.wrap_model(model.train())
    adam = optimizer.make_optimizer(called, config)
    checkpoints.initialize_moments(called, adam)
    manager = CheckpointManager(Path(config.out) / "checkpoints", config.keep, first=engine.rank == 0)
    return Training(config, engine, subject, model, called, adam, reader, held_out, manager, lock)
