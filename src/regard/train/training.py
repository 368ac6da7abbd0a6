"""Training: a run between two steps: its model, its text, how far it is; begun, or gone on with from its last checkpoint."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from regard.errors import ConfigError
from regard.models import GPT2
from regard.text.corpus import Corpus, Reader
from regard.train import checkpoints, memory, optimiser, quick, texts
from regard.train.alone import Alone, Engine
from regard.train.blocks import applied
from regard.train.checkpoints import Checkpoints
from regard.train.config import TrainConfig, refuse_another_run
from regard.train.divergence import Running
from regard.train.seeds import seeded
from regard.weights import gpt2 as files


@dataclass(eq=False)
class Training:
    """A run between two steps."""

    config: TrainConfig
    engine: Engine
    model: GPT2  # as it is looked at
    called: nn.Module  # as it is called in training
    optimiser: torch.optim.Optimizer
    corpus: Corpus  # what is trained on
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
        says |= {"held_out_nats": self.looked, "corpus": identity(self.corpus), "versions": versions()}
        self.checkpoints.save(self.called, self.optimiser, says)

    def save_model(self, name: str) -> None:
        """Writes the model into a folder of the run that GPT2.load reads."""
        weights = self.engine.weights(self.called)
        if self.first:
            if self.model.text is not None:
                self.model.text.save(self.folder / name)
            files.save(self.folder / name, asdict(self.config.model), weights)


def begin(
    config: TrainConfig, engine: Engine | None = None, progress: Callable[[int, int | None], None] | None = None
) -> Training:
    """The run of a config, as it was left, or from the first weight.

    Raises ConfigError for a config that would make another run of the one in its folder, DataError for a damaged checkpoint.
    """
    engine = Alone() if engine is None else engine
    with engine.in_turn():  # the first may have a text to prepare
        corpus = texts.corpus_of(config, progress)
    config = texts.fitted(config, corpus)
    texts.check_prompt(config, corpus.text)
    trained, held_out = readers(config, corpus, engine)
    with seeded(config.seed, 0, 0, engine.device):
        model = quick.fit(GPT2(config.model)).to(engine.device)
    model.text = corpus.text
    memory.keep()
    applied(model, activation_checkpointing=config.activation_checkpointing, compiled=config.compile)
    called = engine.prepared(model.train())
    made = optimiser.made(called, config)
    checkpoints.begun(called, made)
    kept = Checkpoints(Path(config.out) / "checkpoints", config.keep, first=engine.rank == 0)
    training = Training(config, engine, model, called, made, trained.corpus, trained, held_out, kept)
    resume(training)
    return training


def readers(config: TrainConfig, corpus: Corpus, engine: Engine) -> tuple[Reader, Reader | None]:
    """The reader of the text trained on, and of the held-out one where there is any."""
    context = config.model.context
    share = {"context": context, "rank": engine.rank, "world": engine.world}
    if not (config.held_out and config.evaluate_every):
        trained = corpus if not config.held_out else corpus.split(config.held_out)[0]
        return Reader(trained, batch=config.batch, seed=config.seed, **share), None
    trained, kept = corpus.split(config.held_out)
    reader = Reader(trained, batch=config.batch, seed=config.seed, **share)
    return reader, Reader(kept, batch=config.batch, seed=0, **share)


def resume(training: Training) -> None:
    """Puts a run where its last checkpoint left it; does nothing where there is none."""
    config, last = training.config, training.checkpoints.latest()
    if last is None:
        return
    refuse_another_run(TrainConfig.of(last.says["config"]), config, training.folder)
    if last.says["corpus"] != identity(training.corpus):
        raise ConfigError(f"the corpus is another than the one that the run in {training.folder} was trained on.")
    if last.step > config.steps:
        raise ConfigError(f"steps is {config.steps}, and the run in {training.folder} has done {last.step}: say more.")
    checkpoints.load(last, training.called, training.optimiser)
    training.step = training.resumed = last.step
    training.running, training.best = Running(**last.says["running"]), last.says["best"]
    training.looked = last.says["held_out_nats"]


def identity(corpus: Corpus) -> dict[str, int | str]:
    """What tells a corpus from another, wherever it lies."""
    return {"tokens": corpus.tokens, "documents": corpus.documents, "checksum": corpus.checksum}


def versions() -> dict[str, str]:
    """What the run was computed by."""
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
