"""The weights of a call beside those that the model computed, at sampled rows."""

import sys
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.map.small_maps import weigh_scores
from regard.mechanism.heads import share
from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.request import autocast_tensor, disable_autocast, is_autocast_on
from regard.mechanism.scores import score_dtype
from regard.mechanism.steps import normalize_scores
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.forward_cache import cache_in_forward
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.scores.score_parts import UNDERFLOW, bound_products

SAMPLED_ROWS = 4  # of each matrix
MOST_COMPILED = 2**18  # products of rows and keys that are compared by a compiled loop; for more, torch is as fast


def compare_rows(call: AttentionCall, matrix: Tensor, rounding: float, every: bool) -> float | None:
    """Return how far the weights of a call are from the model's own; None if within rounding.

    Rows are sampled, and then `every` row is compared too if the sampled ones agree.
    """
    rows = sample_rows(matrix)
    difference = compare_sampled_rows(call, matrix, rounding, rows)
    has_others = len(rows) < matrix.shape[2]
    if not every or not has_others or difference is not None:
        return difference
    return compare_sampled_rows(call, matrix, rounding, build_sampled_rows(matrix.shape[2], 1, matrix.device))


def compare_sampled_rows(call: AttentionCall, matrix: Tensor, rounding: float, rows: Tensor) -> float | None:
    """Return how far some rows of the weights of a call are from the model's own; None if within rounding.

    Rows that hold NaN are left out, after the quick comparison, which they fail: there the model has none of its own.
    """
    layout = build_row_layout(call, matrix, rows, rounding)
    if layout is not None and layout.are_rows_near(call.q, call.k, matrix):
        return None
    q, k = call.q.detach().index_select(2, rows), call.k.detach()
    if is_autocast_on(q.device):
        q, k = autocast_tensor(q), autocast_tensor(k)
    bias = call.bias if call.bias is None or call.bias.shape[2] == 1 else call.bias.index_select(2, rows)
    kind = score_dtype(matrix.dtype)
    scores, theirs = compute_scores(call, q, k, bias, find_hidden_keys(call, rows)), matrix.index_select(2, rows).to(kind)
    eps = max(rounding, torch.finfo(q.dtype).eps)
    if not theirs.numel():
        return None
    if call.sinks is None:  # the common case first, with few operations
        ours = scores.softmax(-1).to(q.dtype).to(kind)
        if float((ours - theirs).abs_().sub_(theirs, alpha=4 * eps * q.shape[-1]).amax()) <= 4 * eps:
            return None
    ours = (weigh_scores(scores, None) if call.sinks is None else normalize_scores(scores, call.sinks)).to(q.dtype).to(kind)
    has_nan = theirs.isnan().any(-1, keepdim=True)
    difference, tolerance = (ours - theirs).abs_().masked_fill_(has_nan, 0), (theirs * q.shape[-1]).add_(1).mul_(4 * eps)
    size = bound_products(q, k, 1.0 if call.scale is None else call.scale) + bound_seen_bias(scores, bias)
    tolerance += 4 * eps * theirs * size
    return None if bool((difference <= tolerance).logical_or(has_nan).all()) else float(difference.nan_to_num(1).amax())


def bound_seen_bias(scores: Tensor, bias: Tensor | None) -> Tensor | float:
    """Return the largest size of the bias in each row, (b, h, n, 1), without keys whose scores give no weight."""
    if bias is None:
        return 0.0
    is_seen = scores >= scores.amax(-1, keepdim=True) - UNDERFLOW
    return torch.where(is_seen & bias.isfinite(), bias.to(scores.dtype), 0).abs().amax(-1, keepdim=True).clamp(max=1e6)


def sample_rows(matrix: Tensor) -> Tensor:
    """Return the rows of a matrix of weights that are compared, by index (n,)."""
    return build_sampled_rows(matrix.shape[2], max(1, matrix.shape[2] // SAMPLED_ROWS), matrix.device)


@lru_cache(maxsize=8)
def build_sampled_rows(t: int, step: int, device: torch.device) -> Tensor:
    """Return every `step`-th of t rows, and the last, by index (n,)."""
    with torch.inference_mode(False):
        return torch.tensor(sorted({*range(0, t, step), t - 1}), device=device)


def find_hidden_keys(call: AttentionCall, rows: Tensor) -> Tensor | None:
    """Return the table of keys that a call's mask hides from some queries, given by index; None for a mask that hides none.

    That of a few queries is computed once per forward for all layers that share the mask.
    """
    mask, offset, keys = call.mask, call.offset, call.k.shape[2]
    if mask is EVERYTHING:
        return None

    def build_table() -> tuple[Tensor, Tensor]:
        return rows, ~mask.block(rows, torch.arange(keys, device=rows.device), offset)

    if len(rows) > 2 * SAMPLED_ROWS:
        return build_table()[1]
    key = "hidden", id(mask), id(rows), keys, id(offset) if isinstance(offset, Tensor) else offset
    table: Tensor = cache_in_forward(key, (mask, offset), build_table)[1]  # which keeps what the ids are of
    return table


def compute_scores(call: AttentionCall, q: Tensor, k: Tensor, bias: Tensor | None, hidden: Tensor | None) -> Tensor:
    """Compute the scores (b, h, n, k) of some queries, with the bias and the table of keys that are hidden from them."""
    exact = score_dtype(q.dtype)
    with disable_autocast(q.device):
        scores = q.to(exact) @ share(k.to(exact), q.shape[1]).mT
    scores *= q.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = scores if call.softcap is None else call.softcap * (scores / call.softcap).tanh()
    scores = scores if bias is None else scores + bias.to(exact)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def can_compare_compiled(call: AttentionCall, matrix: Tensor, rows: Tensor) -> bool:
    """Return whether a compiled loop can compare rows: of float32 on a CPU, where numba is loaded, which takes a second."""
    if "numba" not in sys.modules or call.softcap is not None or call.sinks is not None or len(rows) > 2 * SAMPLED_ROWS:
        return False
    if is_autocast_on(matrix.device) or matrix.shape[:2].numel() * len(rows) * call.k.shape[2] > MOST_COMPILED:
        return False
    q, k = call.q.shape, call.k.shape
    if matrix.shape != (*q[:3], k[2]) or k[0] != q[0] or isinstance(call.scale, Tensor):
        return False
    tensors = [matrix, call.q, call.k] if call.bias is None else [matrix, call.q, call.k, call.bias]
    return all(
        type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1 and x.numel()
        for x in tensors
    )


class RowLayout(NamedTuple):
    """What a compiled loop reads of sampled rows besides queries, keys and weights, and the layout of these."""

    places: np.ndarray  # (5, 4): address and strides of queries, keys, weights, bias and hidden keys
    sizes: np.ndarray  # batch, heads, heads of the keys, keys, width
    rows: np.ndarray
    numbers: tuple[float, float, float]  # the scale, and the tolerance: a constant and what is added for each unit of a weight
    owners: tuple[Tensor | None, ...]  # of the memory of the bias and of the hidden keys

    def are_rows_near(self, q: Tensor, k: Tensor, matrix: Tensor) -> bool:
        """Return whether the weights of queries and keys of this layout are near the model's own at the sampled rows."""
        from regard.map.compiled import row_comparison  # which imports numba

        self.places[:3, 0] = q.data_ptr(), k.data_ptr(), matrix.data_ptr()
        return bool(row_comparison.are_rows_near(self.places, self.sizes, self.rows, *self.numbers))


def build_row_layout(call: AttentionCall, matrix: Tensor, rows: Tensor, rounding: float) -> RowLayout | None:
    """Return how a compiled loop compares some rows of a call with a matrix, as `compare_sampled_rows` does first.

    None if it cannot: where numba is not loaded, which takes a second, or for tensors that it does not read.
    """
    if not can_compare_compiled(call, matrix, rows):
        return None
    q, k, shape = call.q, call.k, (*matrix.shape[:2], len(rows), matrix.shape[3])
    hidden, bias = find_hidden_keys(call, rows), call.bias
    hidden = None if hidden is None else hidden.expand(shape)
    bias = None if bias is None else bias.expand(matrix.shape)
    if hidden is not None and hidden.stride(-1) != 1:
        return None
    eps = max(rounding, torch.finfo(torch.float32).eps)
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    places = [(0, 0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:3]) for x in (q, k, matrix, bias, hidden)]
    sizes = np.array([*q.shape[:2], k.shape[1], k.shape[2], q.shape[3]])
    numbers = float(scale), 4 * eps, 4 * eps * q.shape[-1]
    return RowLayout(np.array(places), sizes, rows.numpy(), numbers, (bias, hidden))


def add_sinks(call: AttentionCall, matrix: Tensor, trace: Trace) -> AttentionCall | None:
    """Return a call with the sink of each head whose share is what the rows of weights lack of 1; None if there are none.

    exp(s) / (1 + sum exp(s)), for one, is a softmax with a sink of 0.
    """
    if call.sinks is not None or call.weight is not None:
        return None
    rows = sample_rows(matrix)
    bias = call.bias if call.bias is None or call.bias.shape[2] == 1 else call.bias[:, :, rows]
    scores = compute_scores(call, call.q.detach()[:, :, rows], call.k.detach(), bias, find_hidden_keys(call, rows))
    total = matrix[:, :, rows].sum(-1, dtype=scores.dtype)
    if not bool((total < 1).all()):
        return None
    sinks = scores.logsumexp(-1) + (-total).log1p() - total.log()  # by each row; that with the least total is the most precise
    least = total.masked_fill(total == 0, 2).transpose(0, 1).flatten(1).argmin(-1, keepdim=True)  # a blind row has none
    found = sinks.transpose(0, 1).flatten(1).gather(-1, least).squeeze(-1).to(call.q.dtype)
    for one in (torch.zeros_like(found), found):
        with_sinks = replace(call, sinks=one)
        if compare_rows(with_sinks, matrix, trace.eps, trace.may_differ_by_row) is None:
            return with_sinks
    return None
