"""Training: the state of a run between two steps, started from scratch or resumed from its last checkpoint."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.malloc import give_back
from regard.train import checkpoints, memory, optimiser
from regard.train.alone import Alone, Engine
from regard.train.checkpoints import Checkpoints
from regard.train.config import TrainConfig
from regard.train.divergence import Running
from regard.train.memory_need import refuse_more_than_there_is
from regard.train.resume import describe_computer, resume
from regard.train.run_lock import RunLock, lock_run
from regard.train.seeds import seeded
from regard.train.subject import Reader, Subject
from regard.train.subjects import subject_of


@dataclass(eq=False)
class Training:
    """The state of a run between two steps."""

    config: TrainConfig
    engine: Engine
    subject: Subject
    model: Any  # the unwrapped model: a GPT2, a translator
    called: nn.Module  # the model as training calls it: wrapped or sharded
    optimiser: torch.optim.Optimizer
    reader: Reader
    held_out: Reader | None
    checkpoints: Checkpoints
    lock: RunLock | None  # of the folder; held by the first process
    step: int = 0  # completed steps
    resumed: int = 0  # completed steps at the time of resuming
    changes: list[str] = field(default_factory=list)  # since the checkpoint, that may change the last bits
    running: Running = field(default_factory=Running)
    best: float | None = None  # the lowest held-out loss so far, in nats per token
    looked: float | None = None  # the held-out loss of the current step
    stopped: str = ""  # why the run ends before its last step

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out)

    @property
    def first(self) -> bool:
        """Whether this process is the first one, which writes files and prints."""
        return self.engine.rank == 0

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context in which no other run may use the folder."""
        return nullcontext() if self.lock is None else self.lock.held_for_training()

    def stop(self, why: str) -> None:
        """Stop the run after this step, with a checkpoint."""
        self.stopped = why

    def save(self) -> None:
        """Start writing a checkpoint; training may continue at once."""
        says = {"step": self.step, "best": self.best, "running": asdict(self.running), "config": self.config.table()}
        says |= {"held_out_nats": self.looked, "corpus": self.subject.identity()}
        says["computed_by"] = describe_computer(self.config, self.engine)
        self.checkpoints.save(self.called, self.optimiser, says)
        give_back()  # batches of many shapes fragment the memory that is kept

    def save_model(self, name: str) -> None:
        """Write the model into a folder of the run that its load function reads."""
        weights = self.engine.weights(self.called)
        if self.first:
            self.subject.save(self.folder / name, self.model, weights)


def begin(
    config: TrainConfig, engine: Engine | None = None, progress: Callable[[int, int | None], None] | None = None
) -> Training:
    """Create the run of a config, resumed from its last checkpoint or started from scratch.

    Raises ConfigError for a config that would change the results of the run in its folder, and if another process trains in
    that folder; DataError for a damaged checkpoint.
    """
    engine = Alone() if engine is None else engine
    refuse_more_than_there_is(config, engine)  # before anything is written
    lock = None
    try:
        with engine.in_turn():  # the first process may have a text to prepare
            lock = lock_run(Path(config.out)) if engine.rank == 0 else None
            subject = subject_of(config, progress, is_first=engine.rank == 0)
        training = make_training(subject, engine, lock)
        resume(training)
    except BaseException:
        if lock is not None:
            lock.abandon()
        raise
    return training


def make_training(subject: Subject, engine: Engine, lock: RunLock | None) -> Training:
    """Create a run before its first step, with its initial weights."""
    config = subject.config
    refuse_more_than_there_is(config, engine, vocabulary=subject.text.vocabulary)
    trained, held_out = subject.readers(engine)
    with seeded(config.seed, 0, 0, engine.device):
        model = subject.model().to(engine.device)
    memory.keep()
    called = engine.prepared(model.train())
    made = optimiser.made(called, config)
    checkpoints.begun(called, made)
    kept = Checkpoints(Path(config.out) / "checkpoints", config.keep, first=engine.rank == 0)
    return Training(config, engine, subject, model, called, made, trained, held_out, kept, lock)
