"""The attention call that a formula of scores amounts to: q, k, and the rule, with whatever AttentionMap can express."""

import math
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.map.computed_bias import ComputedBias
from regard.map.distance_products import DistanceProducts
from regard.map.relative_bias import is_relative
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.functions.cached_keys import follows_cached_keys
from regard.observe.interception.functions.distributed_tensors import take_local
from regard.observe.interception.handwritten.ancestors.layouts import skip_layouts
from regard.observe.interception.handwritten.products.score_form import ScoreForm, ScoreStep, StepKind
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.scores.axis_groups import Groups
from regard.observe.interception.handwritten.scores.distance_terms import add_terms, read_terms
from regard.observe.interception.handwritten.scores.score_parts import FILLED, ScoreParts, infer_rule_of_parts
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import TOKEN, ModuleFrame, has_separate_sources
from regard.observe.interception.thread_state import STATE

ADDED = (
    "it adds a boolean mask to its scores, which raises those of the keys that the mask shows by 1 and hides none: keys that "
    "it was meant to hide have weights in the map as they have in the model"
)
PICKED = "an index picked its queries: row i of the map is that of the i-th query that was picked"
STORED = "what is added to its scores is stored as it is, for each query and key: {:,} bytes"


def resolve_form(form: ScoreForm, table: AxisTable, groups: Groups, kernel: str, v: Tensor | None) -> AttentionCall:
    """Return the call of a form, with values if they are given. Raises UnreadableError if AttentionMap cannot express it."""
    q, k, parts = collect_parts(form, table, groups)
    frames, pair = STATE.frames, ((form.a, form.b) if is_query_first(form, table, groups) else (form.b, form.a))
    sources, is_picked = has_separate_sources(frames, *pair), is_looked_up(frames[-1], pair[0])
    if parts.query_factor is not None:
        q = q * parts.query_factor
    if parts.key_factor is not None:
        k = k * parts.key_factor
    if parts.more:
        q, k = join_products(q * parts.scale, k, parts.more)
        parts.scale = 1.0
    if v is not None and k.shape[1] != v.shape[1]:
        v = v if v.shape[1] == q.shape[1] else v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        k = k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    b = max(len(x) for x in (q, k, v) if x is not None)
    q, k = (x if len(x) == b else x.expand(b, -1, -1, -1) for x in (q, k))
    v = v if v is None or len(v) == b else v.expand(b, -1, -1, -1)
    mask, offset, bias = infer_rule_of_parts(parts, q, k)
    if not all(one.is_hidden(mask, offset) for one in parts.terms):
        return resolve_form(form.drop_sources(), table, groups, kernel, v)
    bias = add_terms(parts.terms, bias, (b, q.shape[1], q.shape[2], k.shape[2]))
    return AttentionCall(
        kernel=kernel,
        q=q,
        k=k,
        v=v,
        mask=mask,
        offset=offset,
        bias=bias,
        scale=parts.scale,
        softcap=parts.softcap,
        sinks=None if parts.sinks is None else read_sinks(parts.sinks, q.shape[1]),
        has_separate_sources=sources,
        can_use_cache=not is_picked,
        follows_cache=partial(follows_cached_keys, frames[-1], *pair),
        note="; ".join(filter(None, (PICKED * (is_picked and q.shape[2] > 1), describe_bool_bias(parts), describe_bias(bias)))),
    )


def describe_bool_bias(parts: ScoreParts) -> str:
    """Return what is to be said of a boolean mask that is added to scores, or nothing."""
    return ADDED if any(x.dtype == torch.bool and x.any() and not x.all() for x in parts.biases) else ""


def describe_bias(bias: Tensor | None) -> str:
    """Return what is to be said of a bias that is stored with a number for each query and key, or nothing."""
    if bias is None or isinstance(bias, ComputedBias) or min(bias.shape[2:]) == 1 or is_relative(bias):
        return ""
    return STORED.format(bias.nbytes)


def is_looked_up(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether an index picked the entries of a tensor from other tokens, and not from a table of words."""
    maker = skip_layouts(frame, weakref.ref(x))
    return maker is not None and maker.lookup is not None and frame.find_contents(maker.given[0]) == TOKEN


def is_query_first(form: ScoreForm, table: AxisTable, groups: Groups) -> bool:
    """Return whether the queries are the first operand of a form's product."""
    return not set(groups.keys) & {axis for axes in table.expand_dims(form.a_dims) for axis in axes}


def collect_parts(form: ScoreForm, table: AxisTable, groups: Groups) -> tuple[Tensor, Tensor, ScoreParts]:
    """Return the queries (b, h, q, d) and keys (b, g, k, d) of a form, and what its steps amount to."""
    a, b = table.expand_dims(form.a_dims), table.expand_dims(form.b_dims)
    first = is_query_first(form, table, groups)
    query, own = (form.a, a) if first else (form.b, b)
    key, other = (form.b, b) if first else (form.a, a)
    score_axes = {axis for axes in table.expand_dims(form.dims) for axis in axes}
    summed = tuple(axis for axes in own for axis in axes if axis not in score_axes)
    q = arrange_followed(table, query, own, (groups.batch, groups.heads, groups.queries, summed))
    k = arrange_followed(table, key, other, (groups.batch, groups.heads, groups.keys, summed), shared=1)
    heads = math.prod(table.get_sizes(table.expand_axes(groups.heads)))
    q = q.expand(-1, heads, -1, -1)
    parts = ScoreParts()
    for step in form.steps:
        apply_step(parts, step, table, groups)
    return q, k, parts


def arrange_followed(table: AxisTable, x: Tensor, dims: Dims, groups: Dims, shared: int | None = None) -> Tensor:
    """Return what AxisTable.arrange does, with the positions of pixels that x has."""
    arranged, positions = table.arrange(x, dims, groups, shared), STATE.mode.positions

    def follow() -> None:
        if not positions.has(arranged) and (found := positions.find(x)) is not None:
            positions.put(arranged, table.arrange(found.expand(x.shape), dims, groups, shared))

    if positions.stored:
        STATE.mode.follow_positions(follow)
    return arranged


def apply_step(parts: ScoreParts, step: ScoreStep, table: AxisTable, groups: Groups) -> None:
    """Apply a step to the parts. Raises UnreadableError if they cannot express it."""
    if isinstance(step.operand, ScoreForm):
        q, k, others = collect_parts(step.operand, table, groups)
        if others.biases or others.hidden or others.more or others.terms or others.softcap or parts.softcap:
            raise UnreadableError("it adds scores that have steps of their own")
        q = q if others.query_factor is None else q * others.query_factor
        k = k if others.key_factor is None else k * others.key_factor
        parts.more.append((q * (others.scale * step.amount), k))
        return
    terms = None if step.source is None else read_terms(step.source, table, groups)
    if terms is not None:
        parts.terms += [one.scale(step.amount) for one in terms]
        return
    x = step.operand
    if isinstance(x, Tensor):
        parts.raw.append(take_local(x))
        x = table.arrange(x, step.dims, groups.matrix)
    if step.kind is StepKind.SINK and isinstance(x, Tensor):
        parts.sinks = x
    elif step.kind is StepKind.TANH:
        if parts.softcap or parts.biases or parts.hidden or parts.more or parts.terms:
            raise UnreadableError("its tanh is not of the scores alone")
        parts.softcap = 1.0
    elif step.kind is StepKind.FILL and isinstance(x, Tensor):
        if not x.numel() or not (x[0, 0, 0, -1] or x.max()):  # a corner tells of most, and max() is quicker than any()
            return  # as where NaN would be replaced
        if step.amount > FILLED:
            raise UnreadableError(f"it fills scores with {step.amount:g} where a mask would hide keys")
        parts.hidden.append((x, step.amount))
        parts.places.append(len(parts.biases))
    elif step.kind is StepKind.MULTIPLY:
        multiply_parts(parts, x)
    elif isinstance(x, Tensor) and x.shape[-1] > 1:
        parts.biases.append(x if step.amount == 1 else x * step.amount)
        parts.factors.append(step.amount)
    elif isinstance(x, Tensor):
        parts.shift = parts.shift + (float(x) if x.numel() == 1 else x) * step.amount
    elif isinstance(x, float):
        parts.shift = parts.shift + x * step.amount


def read_sinks(x: Tensor, heads: int) -> Tensor:
    """Return sinks (b, h, q, 1) as one number a head.

    Raises UnreadableError if they differ from query to query by more than the rounding of a shift.
    """
    sinks = x.mean((0, 2), keepdim=True)
    if not torch.allclose(x, sinks.expand(x.shape), rtol=0, atol=1e3 * torch.finfo(x.dtype).eps):
        raise UnreadableError("its softmax has a column beside those of the keys that differs from query to query")
    return sinks.flatten().expand(heads).clone()


def multiply_parts(parts: ScoreParts, x: Any) -> None:
    """Multiply scores by a number, or by a tensor that is the same for all keys or for all queries."""
    if isinstance(x, Tensor) and x.numel() == 1:
        x = float(x)
    if isinstance(x, float):
        parts.scale *= x
        parts.factors += [x] if parts.biases or parts.hidden else []
        parts.shift = parts.shift * x
        parts.softcap = None if parts.softcap is None else parts.softcap * x
        parts.biases = [bias * x for bias in parts.biases]
        parts.more = [(q * x, k) for q, k in parts.more]
        parts.terms = [one.scale(x) for one in parts.terms]
        parts.hidden = [(table, amount * x) for table, amount in parts.hidden]
        if x <= 0 and (parts.hidden or parts.softcap is not None):
            raise UnreadableError("it multiplies masked scores by a negative number")
        return
    if parts.softcap is not None or parts.hidden or (x.shape[-1] > 1 and x.shape[-2] > 1):
        raise UnreadableError("it multiplies scores by a tensor of queries and keys")
    if parts.terms:
        parts.biases.append(DistanceProducts(tuple(one.term for one in parts.terms)).to_dense())
        parts.raw.append(parts.biases[-1])
        parts.terms = []
    parts.biases = [bias * x for bias in parts.biases]
    parts.shift = x if parts.shift else 0.0  # no number any more
    if x.shape[-1] > 1:
        factor = x.mT
        parts.key_factor = factor if parts.key_factor is None else parts.key_factor * factor
        parts.more = [(q, k * factor) for q, k in parts.more]
    else:
        parts.query_factor = x if parts.query_factor is None else parts.query_factor * x
        parts.more = [(q * x, k) for q, k in parts.more]


def join_products(q: Tensor, k: Tensor, more: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose product is the sum of several products: their widths are concatenated."""
    queries, keys = [q, *(one for one, _ in more)], [k, *(one for _, one in more)]
    g = max(x.shape[1] for x in keys)
    b = max(len(x) for x in (*queries, *keys))
    queries = [x.expand(b, q.shape[1], -1, -1) for x in queries]
    keys = [(x.repeat_interleave(g // x.shape[1], 1) if x.shape[1] != g else x).expand(b, -1, -1, -1) for x in keys]
    return torch.cat(queries, -1), torch.cat(keys, -1)
