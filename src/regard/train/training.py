"""Training: a run between two steps: its model, its text, how far it is; begun, or gone on with from its last checkpoint."""

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
    """A run between two steps."""

    config: TrainConfig
    engine: Engine
    subject: Subject
    model: Any  # as it is looked at: a GPT2, a translator
    called: nn.Module  # as it is called in training
    optimiser: torch.optim.Optimizer
    reader: Reader
    held_out: Reader | None
    checkpoints: Checkpoints
    lock: RunLock | None  # of the folder; the first process holds it
    step: int = 0  # steps done
    resumed: int = 0  # of which were there at the beginning
    changes: list[str] = field(default_factory=list)  # since the checkpoint, that the last bits depend on
    running: Running = field(default_factory=Running)
    best: float | None = None  # the least held-out loss so far, nats a token
    looked: float | None = None  # the held-out loss of this very step
    stopped: str = ""  # why it ends before its last step

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return Path(self.config.out)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.engine.rank == 0

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context in which no other run may use the folder."""
        return nullcontext() if self.lock is None else self.lock.held_for_training()

    def stop(self, why: str) -> None:
        """Ends the run after this step, with a checkpoint."""
        self.stopped = why

    def save(self) -> None:
        """Begins to write a checkpoint; training may go on at once."""
        says = {"step": self.step, "best": self.best, "running": asdict(self.running), "config": self.config.table()}
        says |= {"held_out_nats": self.looked, "corpus": self.subject.identity()}
        says["computed_by"] = describe_computer(self.config, self.engine)
        self.checkpoints.save(self.called, self.optimiser, says)
        give_back()  # batches of many shapes leave holes in the memory that is kept

    def save_model(self, name: str) -> None:
        """Writes the model into a folder of the run that its load reads."""
        weights = self.engine.weights(self.called)
        if self.first:
            self.subject.save(self.folder / name, self.model, weights)


def begin(
    config: TrainConfig, engine: Engine | None = None, progress: Callable[[int, int | None], None] | None = None
) -> Training:
    """The run of a config, as it was left, or from the first weight.

    Raises ConfigError for a config that would make another run of the one in its folder, and where another process trains in
    it; DataError for a damaged checkpoint.
    """
    engine = Alone() if engine is None else engine
    refuse_more_than_there_is(config, engine)  # before anything is written
    lock = None
    try:
        with engine.in_turn():  # the first may have a text to prepare
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
    """A run before its first step, with its first weights."""
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
