"""attends: the product of attention weights with values, which a model's own code states to be attention."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from regard.errors import ShapeError
from regard.map.stored_matrix import StoredMatrix
from regard.mechanism.arguments import check_count, check_tensor_axes
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, build_plain_call
from regard.observe.interception.call_dispatch import dispatch_call
from regard.observe.interception.handwritten.scores.stored_weights import LIMIT_BYTES, has_unit_rows
from regard.observe.interception.plain_tensors import UnreadableError, unwrap_tensor
from regard.observe.interception.provenance import has_separate_sources
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, sample_state
from regard.observe.interception.thread_state import STATE


def attends(weights: Tensor, values: Tensor, *, heads: int | None = None) -> Tensor:
    """Compute weights @ values, and state that this is attention: inside `record` it is a call with exactly these weights.

    weights are (b, h, q, k), (b, q, k) or (q, k), and values (b, h, k, e), (b, k, e) or (k, e), broadcast as torch does; with
    `heads`, the first of three axes is (b h). The call belongs to the innermost module that runs. Weights that are not negative
    and sum to 1 in each row are a softmax, others are of kind "implicit"; both are stored as they are, and `intervene` changes
    them. Outside `record` and `intervene`, and under torch.compile, it is the product alone.
    """
    check_factors(weights, values, heads)
    if not torch.compiler.is_compiling() and has_torch_function((weights, values)):  # also while a model is watched
        result: Tensor = handle_torch_function(attends, (weights, values), weights, values, heads=heads)
        return result
    return weights @ values


def check_factors(weights: Tensor, values: Tensor, heads: int | None) -> None:
    """Raise ConfigError or ShapeError if weights and values do not multiply, or do not have that many heads."""
    rank = max(check_tensor_axes("weights", weights, 2).dim(), check_tensor_axes("values", values, 2).dim())
    shapes = f"weights {tuple(weights.shape)} and values {tuple(values.shape)}"
    pairs = zip(weights.shape[-3::-1], values.shape[-3::-1], strict=False)  # of the axes before, from the last
    if rank > 4 or weights.shape[-1] != values.shape[-2] or any(a != b and 1 not in (a, b) for a, b in pairs):
        raise ShapeError(f"{shapes} do not multiply: expected (b, h, q, k) and (b, h, k, e), or both without h, or b and h.")
    first = max(x.shape[0] if x.dim() == rank else 1 for x in (weights, values))
    if heads is not None and (rank != 3 or first % check_count("heads", heads)):
        raise ShapeError(f"heads={heads} does not divide the first axis, (b h), of three: got {shapes}.")


def intercept_attends(func: Callable[..., Tensor], weights: Tensor, values: Tensor, *, heads: int | None = None) -> Any:
    """Intercept a call of attends."""
    result = func(weights, values, heads=heads)
    return dispatch_call("regard.attends", lambda: result, lambda: read_call(weights, values, heads or 1, result))


def read_call(weights: Tensor, values: Tensor, heads: int, out: Tensor) -> tuple[AttentionCall | RecurrenceCall, CallAdapter]:
    """Read the call: a RecurrenceCall if its weights are no softmax. Raises UnreadableError if they are too many to store."""
    lead = out.shape[:-2]
    b, h = lead if len(lead) == 2 else (lead[0] // heads, heads) if lead else (1, 1)
    matrix, v, context = (unwrap_tensor(x).expand(*lead, -1, -1).reshape(b, h, *x.shape[-2:]) for x in (weights, values, out))
    note = f"its weights are stored as they are: {matrix.nbytes:,} bytes"
    if matrix.nbytes > LIMIT_BYTES:
        raise UnreadableError(note.replace("are stored", "would be stored"))
    (n, t), is_softmax = matrix.shape[2:], has_unit_rows(matrix.detach(), 0.0)
    plain = build_plain_call(matrix, v, kernel="regard.attends", can_use_cache=n <= t)
    adapter = CallAdapter(
        lambda: out,
        lambda result: result.reshape(context.shape),
        lambda new, result: new.reshape(result.shape),
        weights=matrix,
        plain_call=plain,
        change_weights=partial(change_softmax if is_softmax else hide_entries, matrix),
    )
    if is_softmax:
        k = v.detach().nan_to_num().to(matrix.dtype)  # which show a cache; all scores are 0
        bias = matrix.detach().to(score_dtype(matrix.dtype)).log()
        call = replace(plain, q=k.new_zeros(1).expand(context.shape), k=k, bias=bias, scale=1.0, note=note)
        call.has_separate_sources, call.is_cross = has_separate_sources(STATE.frames, weights, values), True if n > t else None
        return call, adapter
    before = sample_state(v[:, :, : t - n].detach()) if 0 < n < t else None  # of the tokens before, as in a step
    state, entries = sample_state(v.detach()), StoredMatrix(entries=matrix.detach())
    factors = RecurrenceFactors(entries, v.detach(), context.detach(), state, note=note)
    return RecurrenceCall("regard.attends", before, lambda: factors, must_continue=False), adapter


def change_softmax(weights: Tensor, visible: Tensor, factor: float) -> Tensor:
    """Compute the softmax of the logarithms of weights (b, h, q, k) times a factor, over the visible keys (q, k)."""
    largest = weights.detach().amax(-1, keepdim=True)
    left = weights.where(weights > 0, 1).div(largest.where(largest > 0, 1)).pow(factor).where(visible & (weights > 0), 0)
    return left / left.sum(-1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny)


def hide_entries(weights: Tensor, visible: Tensor, factor: float) -> Tensor:
    """Return weights (b, h, q, k) with 0 for keys that are not visible (q, k). Raises UnreadableError for a factor."""
    if factor != 1:
        raise UnreadableError("its weights are no softmax, and the scores that they were made of are not known")
    return weights.where(visible, 0)
