"""When a step is not taken: a loss or a gradient that is no number, or a loss far above those before it.

The rule, on numbers alone: a batch is skipped where its loss or its gradient is not finite, or where, after WARM batches,
its loss is more than `spike` deviations and LEAST nats above the mean. Mean and deviation run over the batches that were
taken, each weighing 1 - 1/SPAN of the one after it. `patience` skipped batches in a row end the run.
"""

import math
from dataclasses import dataclass

SPAN = 100  # batches that the mean runs over
WARM = 50  # batches before which nothing is a spike
LEAST = 0.5  # nats; a spike of less does no harm, however still the loss was


@dataclass(frozen=True)
class Running:
    """The mean and the variance of the losses so far, of how many; and how many batches in a row were skipped since."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0
    skipped: int = 0

    def taken(self, loss: float) -> "Running":
        """After a batch that was taken."""
        weight = max(1 / (self.count + 1), 1 / SPAN)  # a plain mean first
        away = loss - self.mean
        variance = (1 - weight) * (self.variance + weight * away * away)
        return Running(self.mean + weight * away, variance, self.count + 1)

    def left(self) -> "Running":
        """After a batch that was skipped."""
        return Running(self.mean, self.variance, self.count, self.skipped + 1)


def fault(loss: float, gradient_norm: float, running: Running, spike: float) -> str | None:
    """Why a batch must be skipped, in a few words; None where it is taken."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(gradient_norm):
        return f"the gradient is {gradient_norm}"
    limit = running.mean + max(spike * math.sqrt(running.variance), LEAST)
    if spike and running.count >= WARM and loss > limit:
        return f"the loss is {loss:.3g}, and {running.mean:.3g} was usual"
    return None
