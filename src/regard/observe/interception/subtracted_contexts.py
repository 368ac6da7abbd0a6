"""Differential attention that subtracts contexts: two calls with the same values, A₁ v - λ A₂ v, as one signed matrix.

The calls are those of the module that runs. Which of their heads are subtracted, and by which factor, is read from the numbers:
the first operand is a part of the contexts to the bit, the second another part times one number for each head.
Source: Ye et al. 2024, Differential Transformer, https://arxiv.org/abs/2410.05258.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.mechanism.heads import share
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.activated_scores import compute_activation, read_scores
from regard.observe.interception.handwritten.unnormalized_call import mix_rows
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, sample_state

SUBTRACTS = frozenset({"sub", "subtract", "add"})  # functions of two contexts, the second with a negative factor if added
TITLE = "differential attention"
CHECKED_ROWS = 8
VARIES = "its contexts are subtracted by a factor of each query, of which no signed map is recorded"
Made = list[tuple[AttentionCall, Tensor]]  # calls of a module with their contexts (b, h, q, e)


@dataclass(frozen=True, eq=False)
class JoinedHeads:
    """The heads of all calls of a module: their calls, values (b, n, k, e) and contexts (b, n, q, e)."""

    calls: list[AttentionCall]
    values: Tensor
    contexts: Tensor


def read_subtraction(made: Made, name: str, x: Tensor, y: Tensor, result: Tensor) -> RecurrenceCall | None:
    """Return the call that a difference of contexts amounts to; None if its operands are not contexts of these calls.

    Raises UnreadableError if they are, and no matrix is known.
    """
    if x.shape != y.shape or x.dim() != 4 or x.shape != result.shape or name not in SUBTRACTS:
        return None
    heads = join_heads(made)
    if heads is None:
        return None
    for axis in (1, 2):
        for first, second in list_pairs(heads.contexts, x.transpose(1, axis)):
            if not torch.equal(heads.contexts[:, first], x.transpose(1, axis)):
                continue
            factors = solve_factors(heads.contexts[:, second], y.transpose(1, axis))
            sign = -1 if name != "add" else 1
            if factors is not None and bool((sign * factors < 0).any()):
                return build_call(heads, first, second, sign * factors, result.transpose(1, axis))
    return None


def join_heads(made: Made) -> JoinedHeads | None:
    """Return the heads of several calls, those with the same weights side by side; None if their values differ in width."""
    groups: list[Made] = []
    for call, context in made:
        if call.v is None:
            return None
        same = next((one for one in groups if has_same_weights(one[0][0], call)), None)
        if same is None:
            groups.append([(call, context)])
        else:
            same.append((call, context))
    contexts = [torch.cat([context.detach() for _, context in one], 3) for one in groups]
    values = [torch.cat([share_values(call) for call, _ in one], 3) for one in groups]
    if len({(len(x), *x.shape[2:]) for x in contexts}) > 1 or len({(len(x), *x.shape[2:]) for x in values}) > 1:
        return None
    calls = [one[0][0] for one in groups]
    calls = [one if one.scale is not None else replace(one, scale=one.q.shape[3] ** -0.5) for one in calls]
    return JoinedHeads(calls, torch.cat(values, 1), torch.cat(contexts, 1))


def share_values(call: AttentionCall) -> Tensor:
    """Return the values (b, h, k, e) of each head of a call."""
    assert call.v is not None
    return share(call.v.detach(), call.q.shape[1])


def has_same_weights(one: AttentionCall, other: AttentionCall) -> bool:
    """Return whether two calls have the same queries, keys and rule."""
    settings = "mask", "offset", "scale", "softcap"
    if any(getattr(one, name) is not getattr(other, name) and getattr(one, name) != getattr(other, name) for name in settings):
        return False
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("q", "k", "bias", "sinks")]
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def list_pairs(contexts: Tensor, x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Generate which of n heads may be those of x (b, h, q, e) and which those that are subtracted: halves, or in turns."""
    (b, n, queries, width), h = contexts.shape, x.shape[1]
    if x.shape != (b, h, queries, width) or n != 2 * h:
        return
    halves, turns = (slice(h), slice(h, n)), (slice(0, n, 2), slice(1, n, 2))
    yield from (halves, halves[::-1], turns, turns[::-1]) if h > 1 else (halves, halves[::-1])


def solve_factors(contexts: Tensor, y: Tensor) -> Tensor | None:
    """Return the number (h,) by which the contexts of each head (b, h, q, e) were multiplied to y; None if there is none.

    Raises UnreadableError if each row has a number of its own.
    """
    x, exact = contexts.double(), y.detach().double()
    eps = torch.finfo(y.dtype).eps
    squares = x.square().sum((0, 2, 3))
    factors = (x * exact).sum((0, 2, 3)) / squares.where(squares > 0, 1)
    if is_near(factors[:, None, None] * x, exact, eps):
        return factors
    rows = x.square().sum(-1, keepdim=True)
    own = (x * exact).sum(-1, keepdim=True) / rows.where(rows > 0, 1)
    if is_near(own * x, exact, eps) and bool(own.any()):
        raise UnreadableError(VARIES)
    return None


def is_near(x: Tensor, exact: Tensor, eps: float) -> bool:
    """Return whether two tensors are equal up to the rounding of a product with a factor that was rounded itself."""
    return bool(((x - exact).abs() <= 8 * eps * exact.abs().amax((-2, -1), keepdim=True)).all())


def build_call(heads: JoinedHeads, first: slice, second: slice, factors: Tensor, outputs: Tensor) -> RecurrenceCall:
    """Return the call of the signed matrix A_first + factors A_second, checked on sampled rows.

    Raises UnreadableError if the heads have other values, or the rows times these are not the outputs (b, h, q, e).
    """
    values = heads.values[:, first]
    if not torch.equal(values, heads.values[:, second]):
        raise UnreadableError("the contexts that are subtracted have different values, so that they have no joint map")
    matrix = read_scores(heads.calls)
    h, n = outputs.shape[1], heads.contexts.shape[1]
    mixing = torch.zeros(1, h, n, dtype=torch.float64, device=outputs.device)
    numbers = torch.arange(n, device=outputs.device)
    each = torch.arange(h, device=outputs.device)
    mixing[0, each, numbers[first]], mixing[0, each, numbers[second]] = 1.0, factors
    matrix = replace(matrix, mixing=mixing.to(torch.promote_types(outputs.dtype, torch.float32)), title=TITLE)
    queries = torch.linspace(0, outputs.shape[2] - 1, min(outputs.shape[2], CHECKED_ROWS), device=outputs.device).long()
    found, exact = mix_rows(matrix, queries) @ values.double(), outputs.detach()[:, :, queries].double()
    size = float(compute_activation(matrix, queries).sum(-1).amax()) * float(values.double().abs().amax())
    most = size * float(mixing.abs().sum(-1).amax())
    if not bool(((found - exact).abs() <= 64 * torch.finfo(outputs.dtype).eps * most * values.shape[2] ** 0.5).all()):
        raise UnreadableError("the contexts that are subtracted are not those of its softmaxes, as after dropout or a change")
    (queried, t), kernel = (outputs.shape[2], values.shape[2]), " and ".join(dict.fromkeys(one.kernel for one in heads.calls))
    initial = sample_state(values[:, :, : t - queried]) if 0 < queried < t else None
    held = RecurrenceFactors(matrix, values.contiguous(), outputs.detach(), sample_state(values))
    return RecurrenceCall(f"{kernel}, subtracted", initial, lambda: held, must_continue=False, is_reported=False)
