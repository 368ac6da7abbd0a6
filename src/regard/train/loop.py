"""The training loop: a generator that yields a report per step. Printing, plotting, recording and stopping are listeners."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from regard.errors import DataError
from regard.train import optimiser, schedule
from regard.train.alone import Engine
from regard.train.config import TrainConfig
from regard.train.divergence import fault
from regard.train.engine import started
from regard.train.loss import targets_of
from regard.train.report import Report
from regard.train.seeds import seeded
from regard.train.subject import Reader
from regard.train.training import Training, begin

Listener = Callable[[Training, Report], object]


def run(config: TrainConfig, listeners: Iterable[Listener] = (), engine: Engine | None = None) -> Training:
    """Train with a config, or resume the run in its folder; every listener is called after every step."""
    with nullcontext(engine) if engine is not None else started(config) as present:
        training = begin(config, present)
        follow(training, listeners)
        return training


def follow(training: Training, listeners: Iterable[Listener]) -> None:
    """Train to the end of a run, and call each listener with the training and the report of each step."""
    listeners = tuple(listeners)
    for report in loop(training):
        for listener in listeners:
            listener(training, report)


def loop(training: Training) -> Iterator[Report]:
    """Train step by step and yield the report of each, up to the last step or until the training is stopped.

    A checkpoint is written after its report was yielded, so that what listeners write is never behind a checkpoint. Raises
    DataError if a checkpoint cannot be written, or if too many batches in a row had to be skipped.
    """
    with training.in_use():
        try:
            settle_exchanges(training)
            while training.step < training.config.steps and not training.stopped:
                report = looked_at(training, stepped(training))
                yield report
                agree(training)
                training.checkpoints.check()
                write_results(training, report)
            training.checkpoints.wait()
        finally:
            training.checkpoints.close()


def settle_exchanges(training: Training) -> None:
    """Do a backward pass that changes nothing, after which DDP fixes the order in which it sums gradients.

    Otherwise the first step after a checkpoint would sum them in another order than the same step of an uninterrupted run.
    """
    is_over = training.step >= training.config.steps or bool(training.stopped)
    if training.engine.world > 1 and training.config.engine == "ddp" and not is_over:
        batch = training.subject.placed(training.reader.read(0), training.engine.device)
        backward(training, 0, [batch])
        training.optimiser.zero_grad(set_to_none=True)


def write_results(training: Training, report: Report) -> None:
    """Write the model and a checkpoint if they are due after a step; raise DataError if the run diverges."""
    config, is_last = training.config, report.step == training.config.steps
    if report.best or (is_last and training.held_out is None):
        training.save_model("model")
    elif is_last:
        training.save_model("last")
    refuse_divergence(training, report)
    if report.best or due(config.checkpoint_every, report.step) or is_last or training.stopped:
        training.save()


def stepped(training: Training) -> Report:
    """Do one training step: compute the gradient of the mean loss over all its batches, and update the weights."""
    config, engine, model, began = training.config, training.engine, training.called, time.perf_counter()
    subject = training.subject
    number, first = training.step + 1, training.step * config.accumulate
    rate = schedule.rate(number, config)
    batches = [subject.placed(training.reader.read(first + n), engine.device) for n in range(config.accumulate)]
    loss = backward(training, number, batches)
    norm = float(engine.gradient_norm(model))
    wrong = fault(loss, norm, training.running, config.spike)
    if wrong is None:
        optimiser.update(training.optimiser, rate, norm, config.clip)
    training.optimiser.zero_grad(set_to_none=True)
    training.running = training.running.taken(loss) if wrong is None else training.running.left()
    training.step, training.looked = number, None
    tokens = sum(subject.tokens(batch, engine.world) for batch in batches)
    seconds = time.perf_counter() - began
    return Report(
        step=number, loss_nats=loss, rate=rate, gradient_norm=norm, tokens=tokens, seconds=seconds, batch=first, skipped=wrong
    )


def backward(training: Training, step: int, batches: Sequence[Any]) -> float:
    """Return the mean loss over all targets of all batches in all processes; its gradient is accumulated in the parameters."""
    config, engine = training.config, training.engine
    count = engine.total(sum(map(targets_of, batches)))
    parts = []
    with seeded(config.seed, step, engine.rank, engine.device):
        for n, batch in enumerate(batches):
            with engine.exchanging(training.called, n == len(batches) - 1):
                with engine.products(config.precision):  # gradients are averaged over processes: hence count / world
                    loss = training.subject.loss(training.called, batch, count / engine.world)
                loss.backward()
            parts.append(loss.detach())
    return engine.total(float(torch.stack(parts).sum())) / engine.world


def looked_at(training: Training, report: Report) -> Report:
    """Return the report with the held-out loss and a sample if they are due."""
    config, last = training.config, report.step == training.config.steps
    if training.held_out is not None and (due(config.evaluate_every, report.step) or last):
        loss = held_out_loss(training, training.held_out)
        best = math.isfinite(loss) and (training.best is None or loss < training.best)
        training.looked, training.best = loss, loss if best else training.best
        report = replace(report, held_out_nats=loss, best=best)
    if due(config.sample_every, report.step):
        report = replace(report, sample=sampled(training))
    return report


def held_out_loss(training: Training, reader: Reader) -> float:
    """Compute the mean loss over the first held-out batches, the same ones each time."""
    config, engine = training.config, training.engine
    count = min(config.evaluate_batches, reader.batches)
    total = targets = 0.0
    with evaluating(training.called), engine.products(config.precision):
        for n in range(count):
            batch = training.subject.placed(reader.read(n), engine.device)
            here = targets_of(batch)
            total += float(training.subject.nats(training.called, batch))
            targets += here
    return engine.total(total) / max(engine.total(targets), 1)


def sampled(training: Training) -> str:
    """Generate a sample text from the current model."""
    with evaluating(training.model), training.engine.gathered(training.called):
        return training.subject.sampled(training.model, training.held_out or training.reader, training.step)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients for the duration of the context."""
    mode = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(mode)


def agree(training: Training) -> None:
    """Stop the run in all processes if it was stopped in one of them."""
    if training.engine.total(bool(training.stopped)) and not training.stopped:
        training.stop("another process")


def due(every: int, step: int) -> bool:
    """Return whether something that is done every `every` steps is due at this step; 0 stands for never."""
    return bool(every) and step % every == 0


def refuse_divergence(training: Training, report: Report) -> None:
    """Raise DataError if too many batches in a row were skipped."""
    if training.running.skipped >= training.config.patience:
        raise DataError(
            f"the run diverges: {training.running.skipped} steps in a row were skipped, the last of them step {report.step}, "
            f"batch {report.batch}, where {report.skipped}. The last checkpoint is from before; try a lower learning_rate."
        )
