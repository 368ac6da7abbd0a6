"""Run `regard train`.

Exit code 2 if the config cannot be used, the run diverges or the disk is full; 130 after Ctrl-C, 143 after SIGTERM.
"""

import argparse
import importlib.util
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path

import torch

from regard.cli.progress import watched
from regard.errors import ConfigError
from regard.machine import measure_products
from regard.models import GPT2Config
from regard.text.corpus import Corpus
from regard.text.corpus.sources import total
from regard.train import Listener, TrainConfig, Training, begin, follow, plan, start, texts
from regard.train.alone import Engine
from regard.train.config import ENGINES
from regard.train.engine import started
from regard.train.listeners import board, lines
from regard.train.listeners.observation import Observation
from regard.train.listeners.progress import Progress
from regard.train.listeners.signals import Signals

RELEASED = {
    "gpt2": GPT2Config.small,
    "gpt2-medium": GPT2Config.medium,
    "gpt2-large": GPT2Config.large,
    "gpt2-xl": GPT2Config.xl,
}

SIZES = {
    "layers": "layers of the model",
    "heads": "heads per layer",
    "width": "width of the model's vectors",
    "context": "the most tokens that the model reads, and the tokens of a training row",
    "dropout": "the share of numbers that are zeroed in training",
    "inner": "width of the feed-forward layers; 0 for four times the width",
    "activation": "of the feed-forward layers",
    "epsilon": "of the norms",
    "tied": "the head is the token embedding",
}


def run(options: argparse.Namespace) -> int:
    """Train and print the progress, or print a plan."""
    if options.plan is not None:
        say(table_of(configured(options), options))
        return 0
    return trained(configured(options))


def trained(config: TrainConfig) -> int:
    """Train with a config, and return the exit code."""
    signals = Signals()
    with started(config) as engine:
        training = begun(config, engine)
        if training.first:
            tell(training)
            warn_of_slow_products(config.precision, engine.device)
        if training.step < config.steps:
            with signals.caught():
                follow(training, listeners(training, signals))
    return ended(training, signals)


def begun(config: TrainConfig, engine: Engine) -> Training:
    """Create the run, with a bar if preparing its text takes long."""
    read = [0]

    def heard(done: int, whole: int | None) -> None:
        read[0] = done

    prepares = config.text and Path(config.text).exists() and engine.rank == 0
    with watched("reading the text", lambda: read[0], (total(config.text) or 0) if prepares else 0):
        return begin(config, engine, heard)


def table_of(config: TrainConfig, options: argparse.Namespace) -> str:
    """Return the table of plans of a run, or of a released model with the same settings."""
    if options.plan in RELEASED:
        config = replace(config, model=RELEASED[options.plan]())
    elif config.start:
        config, _ = start.begun(config)
    elif config.corpus:
        config = texts.fitted(config, Corpus.load(config.corpus))
    elif config.vocabulary.isdecimal():
        config = replace(config, model=replace(config.gpt2, vocabulary=int(config.vocabulary)))
    engines = {number: ENGINES if number > 1 else ENGINES[:1] for number in options.accelerators}
    plans = [plan.planned(config, number, engine) for number, known in engines.items() for engine in known]
    return plan.table(config, plans, columns=shutil.get_terminal_size().columns, link=options.link)


def configured(options: argparse.Namespace) -> TrainConfig:
    """Return the config of the file, overridden by the flags."""
    given = vars(options)
    flags = {one.name: given[one.name] for one in fields(TrainConfig) if one.name in given}
    flags["model"] = {name: given[name] for name in SIZES if name in given}
    if options.observe is not None:
        flags["observe_every"] = observed(options.observe)
    return TrainConfig.of({}, **flags) if options.config is None else TrainConfig.read(options.config, **flags)


def observed(word: str) -> int:
    """Return the number in `every=N`."""
    number = word.removeprefix("every=")
    if not number.isdecimal():
        raise ConfigError(f"--observe must be every=N, e.g. every=200; got {word!r}.")
    return int(number)


def tell(training: Training) -> None:
    """Print the config, the model, the data, the processes, and the step that the run is resumed from."""
    config, engine = training.config, training.engine
    say(f"{config}\n")
    if engine.world > 1:
        say(f"{engine.world} processes, {config.engine}")
    say(f"{sum(one.numel() for one in training.model.parameters()):,} parameters")
    say(training.subject.about(training.reader))
    if training.step == config.steps:
        say(f"all {config.steps:,} steps are done; a larger --steps continues")
    elif training.resumed:
        say(f"resuming after step {training.resumed:,}")
        if training.changes:
            say(f"not bit-identical from here on: {'; '.join(training.changes)}")


def warn_of_slow_products(precision: str, device: torch.device) -> None:
    """Print a warning if float32 products are faster than those of the precision, as on processors without AVX-512."""
    if precision == "float32" or device.type != "cpu":
        return
    chosen, plain = (measure_products(getattr(torch, name), device) / 1e9 for name in (precision, "float32"))
    if chosen < plain:
        say(
            f"warning: this processor multiplies matrices at {chosen:,.0f} GFLOP/s in {precision} and at {plain:,.0f} in "
            "float32: use --precision float32"
        )


def listeners(training: Training, signals: Signals) -> list[Listener]:
    """Return the listeners of a run."""
    config, folder, peak = training.config, training.folder, 0.0
    if training.subject.flops:
        measured = measure_products(getattr(torch, config.precision), training.engine.device) if not config.peak_tflops else 0.0
        peak = training.engine.total(config.peak_tflops * 1e12 or measured)
    found: list[Listener] = [signals, lines.Log(folder / lines.LOG)]
    if config.observe_every:
        found.append(Observation(folder / lines.HEADS, config.observe_every, config.observe_text))
    if board.installed():
        found.append(board.Board(folder / "tensorboard"))
    return [*found, Progress(peak)]


def ended(training: Training, signals: Signals) -> int:
    """Draw the plots, print where the model is, and return the exit code."""
    if not training.first:
        return code_of(signals)
    say("")
    draw(training)
    folder, step = training.folder, training.step
    if (folder / "model").is_dir():
        which = "" if training.best is None else f", the best: {training.best:.4f} nats per held-out token"
        say(f"model: {folder / 'model'}{which}")
    if signals.came is not None and training.stopped:
        say(f"{signals.came.name}: stopped after step {step:,}, which is saved; the same command resumes there")
    return code_of(signals)


def code_of(signals: Signals) -> int:
    """Return the exit code that a shell reports for a process ended by a signal, 0 without one."""
    return 0 if signals.came is None else 128 + signal.Signals(signals.came)


def draw(training: Training) -> None:
    """Draw the plots of the logs if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        say("pip install matplotlib pillow, and the same command draws the curves")
        return
    from regard.show import curves

    for file, draws, picture in (("log.jsonl", curves.curves, "curves.png"), ("heads.jsonl", curves.formation, "heads.png")):
        path = training.folder / file
        rows = lines.read(path) if path.is_file() else []
        if rows:
            curves.save(draws(rows), training.folder / picture)
            say(f"picture: {training.folder / picture}")


def say(text: str) -> None:
    """Print and flush a line."""
    print(text, flush=True)
