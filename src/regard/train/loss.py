"""The training loss: the cross entropy of the next tokens, in nats."""

from torch import Tensor, nn

from regard.mechanism import EVERYTHING, Documents
from regard.text.corpus import Batch
from regard.text.corpus.reader import NO_TARGET
from regard.text.pairs import Batch as PairBatch
from regard.train.fused_ops import cross_entropy


def compute_loss(
    model: nn.Module, batch: Batch, *, count: float | None = None, mask_documents: bool = False, smoothing: float = 0.0
) -> Tensor:
    """Compute -Σ log p(target) / count over the real targets; count is their number, or their number in all batches of a step.

    p is the softmax of the logits, in float32 or better. With mask_documents a token attends to no earlier document. smoothing
    is that of fused_ops.cross_entropy.
    """
    mask = Documents(batch.documents) if mask_documents else EVERYTHING
    logits = model(batch.tokens, mask=mask)  # (b, t, n)
    nats = cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), smoothing)
    return nats / max(count_targets(batch) if count is None else count, 1)


def count_targets(batch: Batch | PairBatch) -> int:
    """Return the number of real targets of a batch."""
    return int((batch.targets != NO_TARGET).sum())
