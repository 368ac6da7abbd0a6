"""The training loss: the cross entropy of the next tokens, in nats; and when a step is skipped because of it."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from regard.mechanism import EVERYTHING, Documents
from regard.text.corpus import TokenBatch
from regard.text.corpus.reader import NO_TARGET
from regard.text.pairs import PairBatch
from regard.train.fused_ops import cross_entropy

SPAN = 100  # batches in the running mean
WARM = 50  # batches before the first that can be a spike
LEAST = 0.5  # nats; a smaller spike is harmless, however steady the loss was


def compute_loss(
    model: nn.Module, batch: TokenBatch, *, count: float | None = None, mask_documents: bool = False, smoothing: float = 0.0
) -> Tensor:
    """Compute -Σ log p(target) / count over the real targets; count is their number, or their number in all batches of a step.

    p is the softmax of the logits, in float32 or better. With mask_documents a token attends to no earlier document. smoothing
    is that of fused_ops.cross_entropy.
    """
    mask = Documents(batch.documents) if mask_documents else EVERYTHING
    logits = model(batch.tokens, mask=mask)  # (b, t, n)
    nats = cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), smoothing)
    return nats / max(count_targets(batch) if count is None else count, 1)


def count_targets(batch: TokenBatch | PairBatch) -> int:
    """Return the number of real targets of a batch."""
    return int((batch.targets != NO_TARGET).sum())


@dataclass(frozen=True)
class RunningLoss:
    """The running mean and variance of the losses, the number of losses, and the number of batches skipped in a row since."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0
    skipped: int = 0

    def add_loss(self, loss: float) -> "RunningLoss":
        """Return the state after a batch that was not skipped."""
        weight = max(1 / (self.count + 1), 1 / SPAN)  # a plain mean over the first batches
        deviation = loss - self.mean
        variance = (1 - weight) * (self.variance + weight * deviation * deviation)
        return RunningLoss(self.mean + weight * deviation, variance, self.count + 1)

    def add_skipped_batch(self) -> "RunningLoss":
        """Return the state after a batch that was skipped."""
        return RunningLoss(self.mean, self.variance, self.count, self.skipped + 1)


def find_fault(loss: float, gradient_norm: float, running: RunningLoss, spike: float) -> str | None:
    """Return why a batch must be skipped, in a few words; None if it need not be.

    A batch is skipped if its loss or its gradient is not finite or if, after WARM batches, its loss is more than `spike`
    standard deviations, and at least LEAST nats, above the mean. Mean and deviation run over the batches that were not skipped,
    each weighing 1 - 1/SPAN of the one after it. `patience` skipped batches in a row end the run.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(gradient_norm):
        return f"the gradient is {gradient_norm}"
    limit = running.mean + max(spike * math.sqrt(running.variance), LEAST)
    if spike and running.count >= WARM and loss > limit:
        return f"the loss is {loss:.3g}, but the running mean is {running.mean:.3g}"
    return None
