"""Attention with every step returned, for small inputs: the reference definition in this library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.html_repr import HtmlRepr
from regard.mechanism import heads, scores, softmax
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.request import Request, disable_autocast, make_request


@dataclass(frozen=True, eq=False)
class Steps(HtmlRepr):
    """Every step of attention, in order; a step that does nothing equals the one before.

    Shapes: scores ... dropped (b, h, q, k); context (b, h, q, e); without b, or b and h, if the input had none.
    """

    scores: Tensor
    scaled: Tensor
    capped: Tensor
    masked: Tensor
    weights: Tensor
    dropped: Tensor
    context: Tensor

    def __repr__(self) -> str:
        """Return a line for each step, with its shape and dtype."""
        return format_tensors("Steps", self.items())

    def items(self) -> list[tuple[str, Tensor]]:
        """Return the steps with their names."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def format_tensors(title: str, tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Return a line for each named tensor, with its shape and dtype."""
    width = max(len(name) for name, _ in tensors)
    lines = (f"  {name:{width}} {tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}\n" for name, one in tensors)
    return f"{title}(\n{''.join(lines)})"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = EVERYTHING,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    offset: Offset = 0,
    dropout: float = 0.0,
) -> Steps:
    """Compute softmax(q kᵀ / √d) v and return every step.

    Shapes: q (b, h, q, d); k (b, g, k, d); v (b, g, k, e), where g divides h; all without b, or without b and h.
    Scores are multiplied by `scale` (1 / √d), bounded to ±softcap by softcap · tanh(· / softcap), have `bias` added and
    are -inf where the mask hides a key from a query. `sinks` (h,) join each row's denominator. `offset`, an int or
    int64 (b,), is the position of the first query among the keys. A query that may see nothing has weights and context 0.
    Half-precision input, and torch.autocast: float32 from scores to softmax. `dropout` is one F.dropout of the weights.
    Raises ShapeError if shapes do not agree, ConfigError if a setting is impossible.
    Source: Vaswani et al. 2017, equation 1.
    """
    request = make_request(q, k, v, mask, scale, softcap, bias, sinks, offset, dropout)
    return restore_step_ranks(compute_steps(request), request)


def compute_steps(request: Request) -> Steps:
    """Compute every step of a request, on four axes."""
    exact = scores.score_dtype(request.q.dtype)
    with disable_autocast(request.q.device):
        return compute_steps_from_scores(
            scores.dot(request.q.to(exact), heads.share(request.k.to(exact), request.q.shape[1])), request
        )


def compute_steps_from_scores(raw: Tensor, request: Request) -> Steps:
    """Compute the steps that follow from the scores (b, h, q, k)."""
    scaled = raw if request.scale == 1 else raw * request.scale
    capped = scaled if request.softcap is None else request.softcap * (scaled / request.softcap).tanh()
    masked = capped if request.bias is None else capped + request.bias.to(capped.dtype)
    masked = mask_scores(masked, request.mask, request.offset)
    weights = normalize_scores(masked, request.sinks).to(request.v.dtype)
    dropped = F.dropout(weights, request.dropout) if request.dropout else weights
    context = weigh_values(dropped, heads.share(request.v, raw.shape[1]), masked)
    return Steps(raw, scaled, capped, masked, weights, dropped, context)


def restore_step_ranks(steps: Steps, request: Request) -> Steps:
    """Return the steps in the rank of the request's input."""
    return Steps(*(request.restore_rank(step) for _, step in steps.items()))


def mask_scores(scores: Tensor, mask: Mask, offset: Offset) -> Tensor:
    """Set scores to -inf where a query may not see a key."""
    if mask == EVERYTHING:
        return scores
    rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return scores.masked_fill(~mask.block(rows, columns, offset), -torch.inf)


def normalize_scores(masked: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the softmax of each row; sinks (h,) add one score to the denominator, whose weight is left out."""
    if sinks is None:
        return softmax.stable(masked)
    column = sinks.to(masked.dtype).view(-1, 1, 1).expand(*masked.shape[:-1], 1)
    return softmax.stable(torch.cat((masked, column), -1))[..., :-1]


def weigh_values(weights: Tensor, v: Tensor, masked: Tensor) -> Tensor:
    """Compute weights v, where a hidden key contributes nothing to a query, not even the NaN of 0 · NaN.

    The products of NaN are in float32 at least: with AMX, oneDNN 3 spreads a NaN in one row of bfloat16 to the row before.
    """
    context = weights @ v
    if not math.isnan(sum_elements(context)):  # no NaN, nor infinities of both signs; or the sum cannot be computed
        return context
    exact, broken = scores.score_dtype(v.dtype), ~v.isfinite()
    wide = weights.to(exact)
    seen = (masked != -torch.inf).to(exact) @ broken.to(exact) > 0  # this query sees a non-finite number
    spread = (wide @ v.to(exact)).detach()  # detached: 0 · NaN has a gradient
    return (wide @ v.masked_fill(broken, 0).to(exact) + torch.where(seen, spread, 0)).to(v.dtype)


def is_finite(x: Tensor) -> bool:
    """Return whether x and its sum are finite; True where `sum_elements` cannot compute the sum."""
    return math.isfinite(sum_elements(x))


def sum_elements(x: Tensor) -> float:
    """Return the sum of x, in one pass and without a tensor of flags.

    Returns 0 where the sum is not available as a number: under torch.compile or vmap, or on the meta device.
    """
    if torch.compiler.is_compiling():
        return 0.0
    try:
        return (x.sum(dtype=torch.float32) if x.dtype == torch.float16 else x.sum()).item()
    except RuntimeError:
        return 0.0
