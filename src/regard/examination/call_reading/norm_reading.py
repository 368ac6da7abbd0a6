"""Read over which axes queries and keys are normalized, from what their projections made."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import ProjectionSource
from regard.examination.report import Checked, Finding, count_calls

NEAR = 1e-3  # of logarithms of factors
FAINT = 1e-3  # of the largest number: smaller ones are left out
WHAT = "the norm of queries and keys"
PLAIN = "not normalized"
EACH, ALL, ACROSS = "each head", "all heads together", "the heads, in each column"
TOKENS = "the tokens, in each column"
CURE = "Normalize the last axis of each head: q = q_norm(q.view(b, t, heads, d)), with nn.RMSNorm(d), and the same for k."


def check_norms(calls: Sequence[InnerCall]) -> Finding | Checked | None:
    """Check that queries and keys are normalized over the width of each head, or both over all heads; None without norms.

    A norm of queries alone, or of keys alone, is stated, as it may be meant so.
    """
    found: list[str] = []
    for one in calls:
        axes = {who: axis for who, axis in read_norms(one) if axis}
        wrong = next(describe_mistakes(one, axes), None)
        if wrong is not None:
            return one.report("wrong axis", wrong, CURE, 1.5, "norm")
        found += [what] if (what := describe_norms(one)) else []
    if not found:
        return None
    return Checked(found[0], f"in {count_calls(calls)}")


def describe_norms(one: InnerCall) -> str:
    """Describe how queries and keys are normalized, or which of them are not; "" if neither is, or that is not known."""
    sources = (one.q_source, one.k_source)
    sides = {
        who: f"over {axis}" if axis else describe_source(source, width)
        for (who, axis), source, width in zip(read_norms(one), sources, one.widths, strict=True)
    }
    normed = {who: how for who, how in sides.items() if how not in ("", PLAIN)}
    if len(normed) == len(sides):
        first, second = normed.values()
        return f"{WHAT}, {first}" if first == second else f"the norm of queries, {first}, and of keys, {second}"
    plain = [f"; {who} are not" for who, how in sides.items() if how == PLAIN]
    return "".join(f"the norm of {who}, {how}{''.join(plain)}" for who, how in normed.items())


def describe_source(source: ProjectionSource | None, width: int) -> str:
    """Describe a source that is a norm, by its name or its vector of `width` weights, or PLAIN; "" if none is known."""
    if source is None or source.is_ambiguous:
        return ""
    last = source.name.rpartition(".")[2]
    return f"by {last}" if width or "norm" in last.lower() else PLAIN


def describe_mistakes(one: InnerCall, axes: dict[str, str]) -> Iterator[str]:
    """Yield what is wrong with the norms of queries and keys, in words."""
    for who, width in zip(("queries", "keys"), one.widths, strict=True):
        axis = axes.get(who)
        if axis in (ACROSS, TOKENS):
            yield f"{who} are normalized over {axis}, not over the width of each head"
        if axis == ALL and width == one.width:
            yield f"{who} are normalized over all heads together, though the norm has the {width} weights of one head"
    if len(set(axes.values())) > 1:
        yield f"queries are normalized over {axes['queries']}, but keys over {axes['keys']}"


def read_norms(one: InnerCall) -> Iterator[tuple[str, str | None]]:
    """Yield over what queries and keys are normalized, None if they are not or that does not show."""
    for who, named, x, source in (
        ("queries", one.q_named, one.call.q, one.q_source),
        ("keys", one.k_named, one.call.k, one.k_source),
    ):
        after = x if source is None else source.projected
        if named is None or named.shape != after.shape:
            yield who, None
        else:
            axis = read_axes(named.double(), after.double())
            yield who, axis or (find_turned_axis(named.double(), x.double()) if source is None else None)


def read_axes(before: Tensor, after: Tensor) -> str | None:
    """Return over what (b, h, t, d) was divided by its size: EACH, ALL or ACROSS; None if it was not, or in another way.

    Factors that are the same in all sequences are those of positions.
    """
    known = (before.abs() > FAINT * before.abs().max()) & (after != 0)
    factors = (after / before).abs().log().masked_fill(~known, torch.nan)
    if measure_spread(factors) < NEAR or (len(before) > 1 and measure_spread(factors - take_first(factors, 0)) < NEAR):
        return None
    alike_in_width = measure_spread(factors - take_first(factors, -1)) < NEAR
    if before.shape[1] == 1:
        return EACH if alike_in_width else None
    alike_in_heads = measure_spread(factors - take_first(factors, 1)) < NEAR
    if alike_in_width:
        return ALL if alike_in_heads else EACH
    return ACROSS if alike_in_heads else None


def find_turned_axis(before: Tensor, after: Tensor) -> str | None:
    """Return over which axis other than the width (b, h, t, d) was divided by its size, if it was rotated then; None if not.

    A rotation keeps the norm of each token and head.
    """
    for axis, name in ((1, ACROSS), (2, TOKENS)):
        made = before / before.norm(dim=axis, keepdim=True)
        ratio = (after.norm(dim=-1) / made.norm(dim=-1)).log()[after.any(-1)]  # rows of zeros are those of pads
        is_known = before.shape[axis] > 1 and ratio.numel() > 0 and bool(ratio.isfinite().all())
        if is_known and float(ratio.max() - ratio.min()) < NEAR:
            return name
    return None


def take_first(factors: Tensor, axis: int) -> Tensor:
    """Return the first entry along an axis."""
    return factors.narrow(axis, 0, 1)


def measure_spread(factors: Tensor) -> float:
    """Return how far factors (b, h, t, d) differ from token to token, of the entries that are known; 0 if none are."""
    missing = factors.isnan()
    top = factors.masked_fill(missing, -torch.inf).amax((0, 2))
    low = factors.masked_fill(missing, torch.inf).amin((0, 2))
    spread = (top - low)[top >= low]
    return float(spread.max()) if spread.numel() else 0.0
