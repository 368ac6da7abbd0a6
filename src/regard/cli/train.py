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

from regard.cli.progress_bar import show_count_bar
from regard.errors import ConfigError
from regard.machine import measure_product_rate
from regard.models import GPT2Config
from regard.text.corpus import Corpus
from regard.text.corpus.sources import count_bytes
from regard.train import Listener, TrainConfig, Training, begin, cost_estimate, follow, pretrained, text_data
from regard.train.checkpoint_header import list_checkpoint_folders
from regard.train.config import ENGINES
from regard.train.distributed import start_engine
from regard.train.listeners import json_lines, tensorboard_writer
from regard.train.listeners.head_observer import HeadObserver
from regard.train.listeners.memorization import stop_when_memorized
from regard.train.listeners.progress_printer import ProgressPrinter
from regard.train.listeners.signal_listener import SignalListener
from regard.train.single_process import Engine

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
    """Train and print the progress, or print the estimated cost."""
    if options.plan is not None:
        print_line(make_cost_table(make_config(options), options))
        return 0
    for flag in ("accelerators", "link"):
        if getattr(options, flag) is not None:
            raise ConfigError(f"--{flag} is for --plan, which is not given.")
    return train_model(make_config(options))


def train_model(config: TrainConfig) -> int:
    """Train with a config, and return the exit code."""
    refuse_removed_checkpoints(config)
    signals = SignalListener()
    with start_engine(config) as engine:
        training = begin_with_bar(config, engine)
        if training.is_first_process:
            print_run(training)
            warn_of_slow_products(config.precision, engine.device)
        if training.step < config.steps:
            with signals.catch_signals():
                follow(training, make_listeners(training, signals))
    return print_end(training, signals)


def refuse_removed_checkpoints(config: TrainConfig) -> None:
    """Raise ConfigError if the folder of a run has its models and its log, but no checkpoint: a new run would overwrite them.

    A run that was killed before its first checkpoint was complete starts again.
    """
    folder, checkpoints = Path(config.out), Path(config.out) / "checkpoints"
    models = [str(folder / name) for name in ("model", "last") if (folder / name).is_dir()]
    log = folder / json_lines.LOG_NAME
    if not models or not log.is_file() or list_checkpoint_folders(checkpoints) or any(checkpoints.glob(".step-*")):
        return
    rows = json_lines.read_rows(log)
    first_saved = next((row["step"] for row in rows if row.get("best")), config.steps - 1)
    if rows and rows[-1]["step"] > first_saved:
        raise ConfigError(
            f"{folder} has a run of {rows[-1]['step']:,} steps, {' and '.join(models)}, but no checkpoint in {checkpoints} to "
            "resume it from, and a new run would overwrite it. Put the checkpoints back, name another folder with --out, or "
            f"remove {folder}."
        )


def begin_with_bar(config: TrainConfig, engine: Engine) -> Training:
    """Create the run, with a bar if preparing its text takes long."""
    prepares = config.text and Path(config.text).exists() and engine.rank == 0
    with show_count_bar("reading the text", (count_bytes(config.text) or 0) if prepares else 0) as progress:
        return begin(config, engine, progress)


def make_cost_table(config: TrainConfig, options: argparse.Namespace) -> str:
    """Return the table of estimates of a run, or of a released model with the same settings."""
    if options.plan in RELEASED:
        config = replace(config, model=RELEASED[options.plan]())
    elif config.start:
        config, _ = pretrained.apply_pretrained_sizes(config)
    elif config.corpus:
        config = text_data.fit_vocabulary(config, Corpus.load(config.corpus))
    elif config.vocabulary.isdecimal():
        config = replace(config, model=replace(config.gpt2, vocabulary=int(config.vocabulary)))
    engines = {number: ENGINES if number > 1 else ENGINES[:1] for number in options.accelerators or [1]}
    estimates = [cost_estimate.estimate_cost(config, number, engine) for number, known in engines.items() for engine in known]
    return cost_estimate.format_estimates(
        config, estimates, columns=shutil.get_terminal_size().columns, link=options.link or 0.0
    )


def make_config(options: argparse.Namespace) -> TrainConfig:
    """Return the config of the file, overridden by the flags."""
    given = vars(options)
    flags = {one.name: given[one.name] for one in fields(TrainConfig) if one.name in given}
    flags["model"] = {name: given[name] for name in SIZES if name in given}
    if options.observe is not None:
        flags["observe_every"] = parse_observe(options.observe)
    return TrainConfig.from_table({}, **flags) if options.config is None else TrainConfig.read(options.config, **flags)


def parse_observe(word: str) -> int:
    """Return the number in `every=N`."""
    number = word.removeprefix("every=")
    if not number.isdecimal():
        raise ConfigError(f"--observe must be every=N, e.g. every=200; got {word!r}.")
    return int(number)


def print_run(training: Training) -> None:
    """Print the config, the model, the data, the processes, and the step that the run is resumed from."""
    config, engine = training.config, training.engine
    print_line(f"{config}\n")
    if engine.world > 1:
        print_line(f"{engine.world} processes, {config.engine}")
    print_line(f"{sum(one.numel() for one in training.model.parameters()):,} parameters")
    print_line(training.task.describe_data(training.reader))
    if training.step == config.steps:
        print_line(f"all {config.steps:,} steps are done; a larger --steps continues")
    elif training.resumed:
        print_line(f"resuming after step {training.resumed:,}")
        if training.changes:
            print_line(f"not bit-identical from here on: {'; '.join(training.changes)}")


def warn_of_slow_products(precision: str, device: torch.device) -> None:
    """Print a warning if float32 products are faster than those of the precision, as on processors without AVX-512."""
    if precision == "float32" or device.type != "cpu":
        return
    rate, plain_rate = (measure_product_rate(getattr(torch, name), device) / 1e9 for name in (precision, "float32"))
    if rate < plain_rate:
        print_line(
            f"warning: this processor multiplies matrices at {rate:,.0f} GFLOP/s in {precision} and at {plain_rate:,.0f} in "
            "float32: use --precision float32"
        )


def make_listeners(training: Training, signals: SignalListener) -> list[Listener]:
    """Return the listeners of a run."""
    config, folder, peak = training.config, training.folder, 0.0
    if training.task.flops:
        measured = (
            measure_product_rate(getattr(torch, config.precision), training.engine.device) if not config.peak_tflops else 0.0
        )
        peak = training.engine.sum_over_processes(config.peak_tflops * 1e12 or measured)
    found: list[Listener] = [signals, stop_when_memorized, json_lines.ReportLog(folder / json_lines.LOG_NAME)]
    if config.observe_every:
        found.append(HeadObserver(folder / json_lines.HEADS_NAME, config.observe_every, config.observe_text))
    if tensorboard_writer.is_tensorboard_installed():
        found.append(tensorboard_writer.TensorBoardWriter(folder / "tensorboard"))
    return [*found, ProgressPrinter(peak)]


def print_end(training: Training, signals: SignalListener) -> int:
    """Draw the plots, print where the model is, and return the exit code."""
    if not training.is_first_process:
        return get_exit_code(signals)
    print_line("")
    draw_plots(training)
    folder, step = training.folder, training.step
    if (folder / "model").is_dir():
        note = "" if training.best is None else f", the best: {training.best:.4f} nats per held-out token"
        print_line(f"model: {folder / 'model'}{note}")
    if signals.came is not None and training.stopped:
        print_line(f"{signals.came.name}: stopped after step {step:,}, which is saved; the same command resumes there")
    elif training.stopped:
        print_line(f"stopped after step {step:,}: {training.stopped}")
    return get_exit_code(signals)


def get_exit_code(signals: SignalListener) -> int:
    """Return the exit code that a shell reports for a process ended by a signal, 0 without one."""
    return 0 if signals.came is None else 128 + signal.Signals(signals.came)


def draw_plots(training: Training) -> None:
    """Draw the plots of the logs if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print_line("pip install matplotlib pillow, and the same command draws the curves")
        return
    from regard.show import training_curves

    for file, draws, picture in (
        ("log.jsonl", training_curves.draw_training_curves, "curves.png"),
        ("heads.jsonl", training_curves.draw_head_formation, "heads.png"),
    ):
        path = training.folder / file
        rows = json_lines.read_rows(path) if path.is_file() else []
        if rows:
            training_curves.save_picture(draws(rows), training.folder / picture)
            print_line(f"picture: {training.folder / picture}")


def print_line(text: str) -> None:
    """Print and flush a line."""
    print(text, flush=True)
