"""Training: a run between two steps: its model, its text, how far it is; begun, or gone on with from its last checkpoint."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.errors import ConfigError
from regard.malloc import give_back
from regard.train import checkpoints, memory, optimiser
from regard.train.alone import Alone, Engine
from regard.train.checkpoints import Checkpoints
from regard.train.config import TrainConfig, refuse_another_run
from regard.train.divergence import Running
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
    step: int = 0  # steps done
    resumed: int = 0  # of which were there at the beginning
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

    def stop(self, why: str) -> None:
        """Ends the run after this step, with a checkpoint."""
        self.stopped = why

    def save(self) -> None:
        """Begins to write a checkpoint; training may go on at once."""
        says = {"step": self.step, "best": self.best, "running": asdict(self.running), "config": self.config.table()}
        says |= {"held_out_nats": self.looked, "corpus": self.subject.identity(), "versions": versions()}
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

    Raises ConfigError for a config that would make another run of the one in its folder, DataError for a damaged checkpoint.
    """
    engine = Alone() if engine is None else engine
    with engine.in_turn():  # the first may have a text to prepare
        subject = subject_of(config, progress)
    config = subject.config
    trained, held_out = subject.readers(engine)
    with seeded(config.seed, 0, 0, engine.device):
        model = subject.model().to(engine.device)
    memory.keep()
    called = engine.prepared(model.train())
    made = optimiser.made(called, config)
    checkpoints.begun(called, made)
    kept = Checkpoints(Path(config.out) / "checkpoints", config.keep, first=engine.rank == 0)
    training = Training(config, engine, subject, model, called, made, trained, held_out, kept)
    resume(training)
    return training


def resume(training: Training) -> None:
    """Puts a run where its last checkpoint left it; does nothing where there is none."""
    config, last = training.config, training.checkpoints.latest()
    if last is None:
        return
    refuse_another_run(TrainConfig.of(last.says["config"]), config, training.folder)
    if last.says["corpus"] != training.subject.identity():
        raise ConfigError(f"the corpus is another than the one that the run in {training.folder} was trained on.")
    if last.step > config.steps:
        raise ConfigError(f"steps is {config.steps}, and the run in {training.folder} has done {last.step}: say more.")
    checkpoints.load(last, training.called, training.optimiser)
    training.step = training.resumed = last.step
    training.running, training.best = Running(**last.says["running"]), last.says["best"]
    training.looked = last.says["held_out_nats"]


def versions() -> dict[str, str]:
    """What the run was computed by."""
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
