"""Calls whose weights are stored as they are, since no formula of scores is known that gives them."""

import torch
from torch import Tensor

from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.plain_tensors import UnreadableError

LIMIT_BYTES = 2**30  # of weights that are stored


class NoSoftmaxError(UnreadableError):
    """Weights are no softmax of any scores: their rows do not sum to 1. It states why they have no formula of one."""


def store_weights(trace: Trace, matrix: Tensor, v: Tensor, kernel: str, reason: str) -> AttentionCall:
    """Return a call whose bias is the logarithm of followed weights. Raises NoSoftmaxError if their rows do not sum to 1."""
    b, h, t, n = matrix.shape
    if not has_unit_rows(matrix, trace.eps):
        raise NoSoftmaxError(reason)
    if matrix.nbytes > LIMIT_BYTES:
        raise UnreadableError(f"{reason}, and its weights as they are would take {matrix.nbytes:,} bytes")
    width = matrix.new_zeros(b, h, 1, 1)
    q, k = width.expand(b, h, t, 1), width.expand(b, h, n, 1)
    bias = matrix.to(score_dtype(matrix.dtype)).log()
    note = f"{reason}, so its weights are stored as they are: {bias.nbytes:,} bytes"
    return AttentionCall(
        kernel=kernel,
        q=q,
        k=k,
        v=v,
        bias=bias,
        scale=1.0,
        has_separate_sources=trace.has_separate_sources,
        can_use_cache=False,
        note=note,
        has_stored_weights=True,
    )


def has_unit_rows(matrix: Tensor, rounding: float) -> bool:
    """Return whether weights are not negative and each row sums to 1, or is 0 or NaN."""
    total = matrix.sum(-1, dtype=score_dtype(matrix.dtype))
    tolerance = 8 * matrix.shape[-1] ** 0.5 * max(rounding, torch.finfo(matrix.dtype).eps)
    is_unit = ((total - 1).abs() < tolerance) | (total == 0)
    return bool(((matrix >= 0).all(-1) & is_unit | total.isnan()).all())
