"""The training loop: a generator that yields a report per step. Printing, plotting, recording and stopping are listeners."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from regard.errors import DataError
from regard.evaluation_mode import evaluate_mode
from regard.train import optimizer
from regard.train.config import TrainConfig
from regard.train.distributed import start_engine
from regard.train.loss import count_targets, find_fault
from regard.train.seeds import seed_generators
from regard.train.single_process import Engine
from regard.train.training_state import Report, Training, begin
from regard.train.training_task import BatchReader

Listener = Callable[[Training, Report], object]


def run(config: TrainConfig, listeners: Iterable[Listener] = (), engine: Engine | None = None) -> Training:
    """Train with a config, or resume the run in its folder; every listener is called after every step."""
    with nullcontext(engine) if engine is not None else start_engine(config) as present:
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
    with training.hold_folder():
        try:
            fix_gradient_order(training)
            while training.step < training.config.steps and not training.stopped:
                report = add_evaluation(training, run_step(training))
                yield report
                share_stop_request(training)
                training.checkpoints.check_last_save()
                write_results(training, report)
            training.checkpoints.wait()
        finally:
            training.checkpoints.close()


def fix_gradient_order(training: Training) -> None:
    """Do a backward pass that changes nothing, after which DDP fixes the order in which it sums gradients.

    Otherwise the first step after a checkpoint would sum them in another order than the same step of an uninterrupted run.
    """
    is_over = training.step >= training.config.steps or bool(training.stopped)
    if training.engine.world > 1 and training.config.engine == "ddp" and not is_over:
        batch = training.task.move_batch(training.reader.read(0), training.engine.device)
        accumulate_gradients(training, 0, [batch])
        training.optimizer.zero_grad(set_to_none=True)


def write_results(training: Training, report: Report) -> None:
    """Write the model and a checkpoint if they are due after a step; raise DataError if the run diverges."""
    config, is_last = training.config, report.step == training.config.steps
    if report.best or (is_last and training.held_out is None):
        training.save_model("model")
    elif is_last:
        training.save_model("last")
    refuse_divergence(training, report)
    if report.best or is_due(config.checkpoint_every, report.step) or is_last or training.stopped:
        training.save()


def run_step(training: Training) -> Report:
    """Do one training step: compute the gradient of the mean loss over all its batches, and update the weights."""
    config, engine, model, began = training.config, training.engine, training.wrapped_model, time.perf_counter()
    task = training.task
    number, first = training.step + 1, training.step * config.accumulate
    rate = optimizer.compute_learning_rate(number, config)
    batches = [task.move_batch(training.reader.read(first + n), engine.device) for n in range(config.accumulate)]
    loss = accumulate_gradients(training, number, batches)
    norm = float(engine.compute_gradient_norm(model))
    wrong = find_fault(loss, norm, training.running, config.spike)
    if wrong is None:
        optimizer.update_parameters(training.optimizer, rate, norm, config.clip)
    training.optimizer.zero_grad(set_to_none=True)
    training.running = training.running.add_loss(loss) if wrong is None else training.running.add_skipped_batch()
    training.step, training.held_out_nats = number, None
    tokens = sum(task.count_tokens(batch, engine.world) for batch in batches)
    seconds = time.perf_counter() - began
    return Report(
        step=number, loss_nats=loss, rate=rate, gradient_norm=norm, tokens=tokens, seconds=seconds, batch=first, skipped=wrong
    )


def accumulate_gradients(training: Training, step: int, batches: Sequence[Any]) -> float:
    """Return the mean loss over all targets of all batches in all processes; its gradient is accumulated in the parameters."""
    config, engine = training.config, training.engine
    count = engine.sum_over_processes(sum(map(count_targets, batches)))
    parts = []
    with seed_generators(config.seed, step, engine.rank, engine.device):
        for n, batch in enumerate(batches):
            with engine.make_gradient_sync_context(training.wrapped_model, n == len(batches) - 1):
                with engine.make_autocast_context(
                    config.precision
                ):  # gradients are averaged over processes: hence count / world
                    loss = training.task.compute_loss(training.wrapped_model, batch, count / engine.world)
                loss.backward()
            parts.append(loss.detach())
    return engine.sum_over_processes(float(torch.stack(parts).sum())) / engine.world


def add_evaluation(training: Training, report: Report) -> Report:
    """Return the report with the held-out loss and a sample if they are due."""
    config, last = training.config, report.step == training.config.steps
    if training.held_out is not None and (is_due(config.evaluate_every, report.step) or last):
        loss = compute_held_out_loss(training, training.held_out)
        best = math.isfinite(loss) and (training.best is None or loss < training.best)
        training.held_out_nats, training.best = loss, loss if best else training.best
        report = replace(report, held_out_nats=loss, best=best)
    if is_due(config.sample_every, report.step):
        report = replace(report, sample=generate_sample(training))
    return report


def compute_held_out_loss(training: Training, reader: BatchReader) -> float:
    """Compute the mean loss over the first held-out batches, the same ones each time."""
    config, engine = training.config, training.engine
    count = min(config.evaluate_batches, reader.batches)
    total = targets = 0.0
    with evaluate_mode(training.wrapped_model), torch.no_grad(), engine.make_autocast_context(config.precision):
        for n in range(count):
            batch = training.task.move_batch(reader.read(n), engine.device)
            count_here = count_targets(batch)
            total += float(training.task.compute_nats(training.wrapped_model, batch))
            targets += count_here
    return engine.sum_over_processes(total) / max(engine.sum_over_processes(targets), 1)


def generate_sample(training: Training) -> str:
    """Generate a sample text from the current model."""
    with evaluate_mode(training.model), torch.no_grad(), training.engine.gather_weights(training.wrapped_model):
        return training.task.generate_sample(training.model, training.held_out or training.reader, training.step)


def share_stop_request(training: Training) -> None:
    """Stop the run in all processes if it was stopped in one of them."""
    if training.engine.sum_over_processes(bool(training.stopped)) and not training.stopped:
        training.stop("another process")


def is_due(every: int, step: int) -> bool:
    """Return whether something that is done every `every` steps is due at this step; 0 stands for never."""
    return bool(every) and step % every == 0


def refuse_divergence(training: Training, report: Report) -> None:
    """Raise DataError if too many batches in a row were skipped."""
    if training.running.skipped >= training.config.patience:
        raise DataError(
            f"the run diverges: {training.running.skipped} steps in a row were skipped, the last of them step {report.step}, "
            f"batch {report.batch}, where {report.skipped}. The last checkpoint is from before; try a lower learning_rate."
        )
