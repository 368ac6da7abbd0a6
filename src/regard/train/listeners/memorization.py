"""Memorization: a run ends when its text is known by heart, since more steps teach nothing, and the loss would rise again."""

from regard.train.loss import SPAN
from regard.train.training_state import Report, Training

MEMORIZED = 0.01  # nats: a mean loss at which each next token has a probability of 99 %


def stop_when_memorized(training: Training, report: Report) -> None:
    """Save the model and stop the run if the running mean of the loss, over SPAN steps or more, is below MEMORIZED."""
    running = training.running
    if running.count >= SPAN and running.mean < MEMORIZED and not training.stopped:
        training.save_model("model" if training.held_out is None else "last")
        training.stop(f"the text is known by heart, at a mean loss of {running.mean:.2g} nats; a longer text teaches more")
