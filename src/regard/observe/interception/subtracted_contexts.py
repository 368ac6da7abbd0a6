"""Differential attention that subtracts contexts: two calls with the same values, A₁ v - λ A₂ v, as one signed matrix.

The calls are those of the module that runs. Which of their heads are subtracted, and by which factors, is read from the
numbers: each term is a part of the contexts times one number for each head, or the first a context that is changed in place.
Source: Ye et al. 2024, Differential Transformer, https://arxiv.org/abs/2410.05258.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from regard.mechanism import attend
from regard.mechanism.heads import share
from regard.mechanism.masks import Given
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, adapt_entries, build_plain_call, hide_by_bias
from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.traces import share_memory
from regard.observe.interception.handwritten.scores.activated_scores import compute_activation, read_scores
from regard.observe.interception.handwritten.scores.unnormalized_call import mix_rows
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, sample_state

OPERANDS = {"sub": 2, "subtract": 2, "rsub": 2, "add": 2, "addcmul": 3, "lerp": 2}  # tensors that functions add or multiply
TITLE = "differential attention"
CHECKED_ROWS = 8
VARIES = "its contexts are subtracted by a factor of each query, of which no signed map is recorded"
Term = tuple[slice, Tensor]  # heads, and what multiplies the context of each
Made = list[tuple[AttentionCall, Tensor]]  # calls of a module with their contexts (b, h, q, e)


@dataclass(frozen=True, eq=False)
class JoinedHeads:
    """The heads of all calls of a module: their calls, values (b, n, k, e) and contexts (b, n, q, e)."""

    calls: list[AttentionCall]
    values: Tensor
    contexts: Tensor


def may_subtract(contexts: list[Any], name: str, result: Any) -> bool:
    """Return whether a function adds, and to half the entries of the contexts of some calls, as their difference has: quick."""
    if strip_affixes(name) not in OPERANDS or type(result) is not Tensor or result.dim() not in (3, 4):
        return False
    if any(call.v is None for call, *_ in contexts):
        return False
    entries: int = sum(call.q.shape[:3].numel() * call.v.shape[3] for call, *_ in contexts)
    return 2 * result.numel() == entries


def read_subtraction(
    made: Made, name: str, args: Any, kwargs: Any, result: Tensor
) -> tuple[RecurrenceCall, Callable[[], CallAdapter]] | None:
    """Return the call that a sum of contexts with factors of both signs amounts to, and what returns how it is changed.

    Return None if it is none of these calls. Where gradients are on, changed weights have those of the factors too. Raises
    UnreadableError if it is one, and no matrix is known.
    """
    terms = split_terms(name, args, kwargs)
    if terms is None or any(x.shape != result.shape for x, _ in terms):
        return None
    heads = join_heads(made)
    if heads is None:
        return None
    is_in_place = args[0] is result and any(share_memory(result, context) for _, context in made)
    (x, first_amount), (y, second_amount) = terms
    for arrange in list_layouts(heads.contexts, result):
        output = arrange(result)
        for first, second in list_pairs(heads.contexts, output):
            ones = output.new_ones(output.shape[1], dtype=torch.float64)
            ours = ones if is_in_place else solve_number(heads.contexts[:, first], arrange(x))
            if ours is None or not bool(ours.any()):
                continue
            theirs = solve_factors(heads.contexts[:, second], arrange(y))
            if theirs is None:
                continue
            ours, theirs = first_amount * ours, second_amount * theirs
            if bool((ours * theirs < 0).any()):
                terms_of_heads = (first, ours), (second, theirs)
                call = build_call(heads, *terms_of_heads, output)
                return call, partial(adapt_difference, heads, *terms_of_heads, result, arrange, call.kernel)
    return None


def split_terms(name: str, args: Any, kwargs: Any) -> list[tuple[Tensor, Any]] | None:
    """Return the two terms that a function adds, each with what multiplies it; None if they are no plain tensors."""
    core = strip_affixes(name)
    if len(args) < OPERANDS[core] or not all(type(x) is Tensor for x in args[: OPERANDS[core]]):
        return None
    x, y, *others = args
    if core == "addcmul":
        return [(x, 1.0), (y * others[0], kwargs.get("value", 1.0))]
    if core == "lerp":
        weight = others[0] if others else kwargs["weight"]
        return [(x, 1.0), (weight * (y - x), 1.0)] if isinstance(weight, Tensor) else [(x, 1.0 - weight), (y, weight)]
    if core == "rsub" or name.startswith("__r"):
        x, y = y, x
    amount = kwargs.get("alpha", 1.0) * (1.0 if core == "add" else -1.0)
    return [(x, 1.0), (y, amount)]


def list_layouts(contexts: Tensor, x: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Generate functions that bring tensors of the shape of x to (b, h, q, e), half the heads of contexts (b, n, q, e)."""
    b, n, queries, width = contexts.shape
    h = n // 2
    if x.shape == (b, h, queries, width):
        yield lambda y: y
    if x.shape == (b, queries, h, width):
        yield lambda y: y.transpose(1, 2)
    if x.shape == (b, queries, h * width):
        yield lambda y: y.unflatten(2, (h, width)).transpose(1, 2)


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
    contexts = [torch.cat([context for _, context in one], 3) for one in groups]
    values = [torch.cat([share_values(call) for call, _ in one], 3) for one in groups]
    if len({(len(x), *x.shape[2:]) for x in contexts}) > 1 or len({(len(x), *x.shape[2:]) for x in values}) > 1:
        return None
    calls = [one[0][0] for one in groups]
    calls = [one if one.scale is not None else replace(one, scale=one.q.shape[3] ** -0.5) for one in calls]
    return JoinedHeads(calls, torch.cat(values, 1), torch.cat(contexts, 1))


def share_values(call: AttentionCall) -> Tensor:
    """Return the values (b, h, k, e) of each head of a call."""
    assert call.v is not None
    return share(call.v, call.q.shape[1])


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


def solve_number(contexts: Tensor, y: Tensor) -> Tensor | None:
    """Return the number (h,) by which the contexts of each head (b, h, q, e) were multiplied to y; None if there is none.

    Its gradient is that of the number: as a function of contexts that y is a multiple of, it is constant.
    """
    x, exact = contexts.double(), y.double()
    squares = x.square().sum((0, 2, 3))
    factors = (x * exact).sum((0, 2, 3)) / squares.where(squares > 0, 1)
    return factors if is_near(factors[:, None, None] * x, exact, torch.finfo(y.dtype).eps) else None


def solve_factors(contexts: Tensor, y: Tensor) -> Tensor | None:
    """Return the numbers of solve_number. Raises UnreadableError if each row has a number of its own."""
    factors = solve_number(contexts, y)
    if factors is not None:
        return factors
    x, exact = contexts.double(), y.detach().double()
    rows = x.square().sum(-1, keepdim=True)
    own = (x * exact).sum(-1, keepdim=True) / rows.where(rows > 0, 1)
    if is_near(own * x, exact, torch.finfo(y.dtype).eps) and bool(own.any()):
        raise UnreadableError(VARIES)
    return None


def is_near(x: Tensor, exact: Tensor, eps: float) -> bool:
    """Return whether two tensors are equal up to the rounding of a product with a factor that was rounded itself."""
    return bool(((x - exact).abs() <= 8 * eps * exact.abs().amax((-2, -1), keepdim=True)).all())


def build_call(heads: JoinedHeads, one: Term, other: Term, outputs: Tensor) -> RecurrenceCall:
    """Return the call of the signed matrix of two groups of heads, each times its factors, checked on sampled rows.

    Raises UnreadableError if the heads have other values, or the rows times these are not the outputs (b, h, q, e).
    """
    (first, ours), (second, theirs) = one, other
    values = heads.values[:, first]
    if not torch.equal(values, heads.values[:, second]):
        raise UnreadableError("the contexts that are subtracted have different values, so that they have no joint map")
    matrix = read_scores(heads.calls)
    h, n = outputs.shape[1], heads.contexts.shape[1]
    mixing = torch.zeros(1, h, n, dtype=torch.float64, device=outputs.device)
    numbers = torch.arange(n, device=outputs.device)
    each = torch.arange(h, device=outputs.device)
    mixing[0, each, numbers[first]], mixing[0, each, numbers[second]] = ours.detach(), theirs.detach()
    matrix = replace(matrix, mixing=mixing.to(torch.promote_types(outputs.dtype, torch.float32)), title=TITLE)
    queries = torch.linspace(0, outputs.shape[2] - 1, min(outputs.shape[2], CHECKED_ROWS), device=outputs.device).long()
    found, exact = mix_rows(matrix, queries) @ values.detach().double(), outputs.detach()[:, :, queries].double()
    size = float(compute_activation(matrix, queries).sum(-1).amax()) * float(values.detach().double().abs().amax())
    most = size * float(mixing.abs().sum(-1).amax())
    if not bool(((found - exact).abs() <= 64 * torch.finfo(outputs.dtype).eps * most * values.shape[2] ** 0.5).all()):
        raise UnreadableError("the contexts that are subtracted are not those of its softmaxes, as after dropout or a change")
    (queried, t), kernel = (outputs.shape[2], values.shape[2]), " and ".join(dict.fromkeys(call.kernel for call in heads.calls))
    initial = sample_state(values[:, :, : t - queried]) if 0 < queried < t else None
    values = values.detach()
    held = RecurrenceFactors(matrix, values.contiguous(), outputs.detach(), sample_state(values))
    return RecurrenceCall(f"{kernel}, subtracted", initial, lambda: held, must_continue=False, is_reported=False)


def adapt_difference(
    heads: JoinedHeads, one: Term, other: Term, result: Tensor, arrange: Callable[[Tensor], Tensor], kernel: str
) -> CallAdapter:
    """Return how a difference of contexts converts to (b, h, q, e) and back, and how its weights change."""
    numbers = arrange(torch.arange(result.numel(), device=result.device).view(result.shape))
    adapter = adapt_entries(result, numbers.flatten().argsort().view(result.shape), numbers.shape)
    can_use_cache = all(call.can_use_cache for call in heads.calls)
    values = heads.values[:, one[0]]
    adapter.plain_call = build_plain_call(arrange(result), values, kernel=kernel, can_use_cache=can_use_cache)
    adapter.change_weights = partial(weigh_difference, heads.calls, one, other)
    adapter.weights = adapter.change_weights(values.new_ones(numbers.shape[2], values.shape[2], dtype=torch.bool), 1.0)
    return adapter


def weigh_difference(calls: list[AttentionCall], one: Term, other: Term, visible: Tensor, by: float) -> Tensor:
    """Compute the signed weights (b, h, q, k) of calls whose scores are multiplied by a number, on visible keys (q, k)."""
    found = []
    for call in calls:
        assert call.v is not None
        dtype = reduce(torch.promote_types, (call.q.dtype, call.k.dtype, call.v.dtype))
        q, k, v = (x.to(dtype) for x in (call.q * by, call.k, call.v))
        mask = call.mask if bool(visible.all()) else call.mask & Given(visible) & hide_by_bias(call)
        steps = attend(q, k, v, mask, scale=call.scale, softcap=call.softcap, bias=call.bias, offset=call.offset)
        found.append(steps.weights)
    weights = torch.cat(found, 1)
    (first, ours), (second, theirs) = ((part, factor.to(weights.dtype).view(-1, 1, 1)) for part, factor in (one, other))
    return ours * weights[:, first] + theirs * weights[:, second]
