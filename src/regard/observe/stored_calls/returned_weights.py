"""The weights that a model's own code returns beside those of its queries and keys, at some rows."""

import math
from typing import Any

import torch
from torch import Tensor

from regard.mechanism import Steps, attend
from regard.mechanism.masks import Given
from regard.observe.interception.attention_call import AttentionCall, CallAdapter

WEIGHT_TOLERANCE = 2e-2  # tolerance to weights that a model's own code computed, perhaps in half precision
COMPARED_ROWS = 4  # of weights that a model's own code computed


def compare_weights(call: AttentionCall, adapter: CallAdapter, result: Any) -> tuple[bool, bool]:
    """Return whether the weights that the model's own code returns are those of q and k, and whether it attends by these.

    Some rows of the first sequence are compared. Both are True if there are no weights, if some were dropped, or if the batch
    rows have different offsets. Some code returns the weights without the sinks, and attends by those with them, as its context
    shows.
    """
    weights = None if adapter.read_weights is None else adapter.read_weights(result)
    if weights is None or call.dropout or isinstance(call.offset, Tensor):
        return True, True
    q = call.q.shape[2]
    rows = torch.tensor(
        sorted({*range(q)[:: max(1, q // COMPARED_ROWS)], *range(q)[-1:]}), dtype=torch.long, device=call.q.device
    )
    ours = compute_rows(call, rows, call.sinks)
    theirs = weights.detach()[:1, :, rows]
    sees = ours.weights.any(-1, keepdim=True)  # rows that see nothing are left out
    if ours.weights.shape == theirs.shape:
        theirs = torch.where(sees, theirs, ours.weights)
    distance, rounding = measure_distance(ours.weights, theirs), torch.finfo(weights.dtype).eps / 4  # of scores, at most
    tolerance = max(WEIGHT_TOLERANCE, rounding * float(ours.scaled.abs().max())) if ours.scaled.numel() else WEIGHT_TOLERANCE
    is_same = distance <= tolerance
    if call.sinks is None or call.v is None or adapter.context is None:
        return is_same, is_same
    without_sinks = measure_distance(compute_rows(call, rows, None).weights, theirs)
    if is_same or without_sinks > tolerance:
        return is_same and distance <= without_sinks, is_same
    context = torch.where(sees, adapter.context(result).detach()[:1, :, rows], ours.context)
    largest = float(ours.context.abs().max())
    return False, measure_distance(ours.context, context) <= tolerance * largest


def compute_rows(call: AttentionCall, rows: Tensor, sinks: Tensor | None) -> Steps:
    """Return the steps of some rows of the first sequence of a call, with these sinks."""
    seen = call.mask.block(rows, torch.arange(call.k.shape[2], device=rows.device), call.offset)[:1]
    q, k = call.q[:1, :, rows].detach(), call.k[:1].detach()
    v = k if call.v is None else call.v[:1].detach()
    bias = None if call.bias is None else call.bias[:1].detach()
    bias = bias if bias is None or bias.shape[2] == 1 else bias[:, :, rows]
    sinks = None if sinks is None else sinks.detach()
    return attend(q, k, v, Given.from_shared_table(seen), scale=call.scale, softcap=call.softcap, bias=bias, sinks=sinks)


def measure_distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two tensors, 0 of empty ones; infinity if their shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    return float((ours - theirs.to(ours.dtype)).abs().max()) if ours.numel() else 0.0
