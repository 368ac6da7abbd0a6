"""The attention call behind weights that a model computed by hand: q, k, v, and the rule that turns their scores into weights.

The formula comes from the operations that were followed. Its weights are compared with the model's own on sampled rows. Where
they differ, or the formula is not known, the weights themselves are recorded: their logarithms are the bias of a call without
queries and keys, which keeps q x k numbers and is exact.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.map.distance_products import DistanceProducts
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, build_plain_call
from regard.observe.interception.function_roles import BASES
from regard.observe.interception.functions.distributed_tensors import RankSplit, distribute_like, find_split, take_local
from regard.observe.interception.handwritten.ancestors.layouts import KEEPS_NUMBERS
from regard.observe.interception.handwritten.products.head_guesses import note_guess
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.scores.axis_groups import Groups, describe_choice, find_groups
from regard.observe.interception.handwritten.scores.row_comparison import add_sinks, compare_rows
from regard.observe.interception.handwritten.scores.row_edits import MAXIMA_OF_TWO
from regard.observe.interception.handwritten.scores.score_formula import resolve_form
from regard.observe.interception.handwritten.scores.stored_weights import (
    NoSoftmaxError,
    has_unit_rows,
    store_weights,
)
from regard.observe.interception.handwritten.scores.unnormalized_call import build_unnormalized_call
from regard.observe.interception.handwritten.softmax.undivided_contexts import DIVIDED, UNSEEN
from regard.observe.interception.plain_tensors import UNFOLLOWED, UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.thread_state import STATE

GATED = "its weights are multiplied by a gate after the softmax, which the map leaves out"


class HandwrittenCall(NamedTuple):
    """A product of followed weights with values, as it was seen."""

    steps: str  # "softmax and matmul"
    trace: Trace  # of the weights
    tensor: Tensor  # the weights
    product: LabelledProduct | None
    place: int  # of the weights among the product's operands

    @property
    def values(self) -> Tensor:
        """What the weights are multiplied with."""
        assert self.product is not None
        return self.product.operands[1 - self.place]


def read_call(
    product_call: HandwrittenCall, table: AxisTable, result: Tensor
) -> tuple[AttentionCall | RecurrenceCall, CallAdapter]:
    """Read a call whose result has been computed: a RecurrenceCall if its weights are no softmax.

    Raises UnreadableError if its parts are not known.
    """
    weights, product, place = product_call.trace, product_call.product, product_call.place
    if product is None or weights.dims is None or product_call.tensor.layout is not torch.strided:
        raise UnreadableError(UNFOLLOWED)
    if product.added is not None and bool(take_local(product.added[0]).any()):
        raise UnreadableError(UNFOLLOWED)
    dims = product.build_dims(table, {place: weights.dims})
    value, own = product_call.values, dims[1 - place]
    groups = find_groups(product, place, weights, table, dims)
    batch, heads = table.expand_axes(groups.batch), table.expand_axes(groups.heads)
    rank_split = find_split(result, table.expand_dims(dims[2]), batch, heads, table.sizes)
    with table.use_rank_split(rank_split):
        call, adapter = read_grouped_call(product_call, table, groups, result, value, own, dims[2])
    call = note_guess(call, groups.guess)
    if rank_split is None:
        return call, adapter
    if isinstance(call, AttentionCall):
        unseen = "" if adapter.divisor is None else UNSEEN
        note = "; ".join(filter(None, (call.note, unseen, rank_split.note)))
        part = rank_split.find_part(batch, heads, table.sizes)
        return replace(call, note=note, rank_part=part), adapt_to_part(adapter, table, rank_split)
    return replace(call, read_softmaxes=list), CallAdapter(adapter.run)


def adapt_to_part(adapter: CallAdapter, table: AxisTable, rank_split: RankSplit) -> CallAdapter:
    """Return the adapter of a call whose tensors are split among ranks: contexts are those of this rank."""
    read, write = adapter.context, adapter.result
    if read is None or write is None:
        return CallAdapter(adapter.run)

    def read_context(out: Tensor) -> Tensor:
        with table.use_rank_split(rank_split):
            return read(out)

    def write_context(new: Tensor, out: Tensor) -> Any:
        with table.use_rank_split(rank_split):
            return distribute_like(write(new, take_local(out)), out)

    return CallAdapter(adapter.run, read_context, write_context, is_reversible=False)


def read_grouped_call(
    product_call: HandwrittenCall, table: AxisTable, groups: Groups, result: Tensor, value: Tensor, own: Dims, dims: Dims
) -> tuple[AttentionCall | RecurrenceCall, CallAdapter]:
    """Read a call whose axes are known, from its values with axes `own` and its result with axes `dims`."""
    weights = product_call.trace
    assert weights.dims is not None
    v = table.arrange(value, own, (groups.batch, groups.heads, groups.keys, groups.width), shared=1)
    tensor, axes = weights.undropped or (product_call.tensor.detach(), weights.dims)
    matrix = table.arrange(tensor, axes or weights.dims, groups.matrix)
    assert product_call.product is not None
    matrix = matrix if product_call.product.factor == 1 else matrix * product_call.product.factor
    four = (groups.batch, groups.heads, groups.queries, groups.width)
    total: Tensor | None = None
    change = partial(weigh_again, product_call, table, groups)

    def read_context(out: Tensor) -> Tensor:
        context = table.arrange(out, dims, four)
        return context if total is None else context / total.masked_fill(total == 0, 1)  # a gate that is shut leaves no context

    def write_context(new: Tensor, out: Tensor) -> Tensor:
        return table.restore(new if total is None else new * total, four, dims, out.shape)

    try:
        call, total = build_call(product_call, table, groups, matrix, v)
    except NoSoftmaxError as error:
        context = table.arrange(result, dims, four)
        kernel = f"by hand: {product_call.steps}"
        other = build_unnormalized_call(weights, table, groups, matrix, v, context, kernel, str(error))
        adapter = CallAdapter(lambda: result, read_context, write_context, weights=matrix, change_weights=change)
        adapter.plain_call = build_plain_call(matrix, v, kernel=kernel, can_use_cache=not weights.has_separate_sources)
        return other, adapter

    call.has_dropped_weights = weights.undropped is not None
    adapter = CallAdapter(lambda: result, read_context, write_context, is_reversible=total is None, weights=matrix)
    if call.has_stored_weights:
        adapter.change_weights = change
        adapter.plain_call = build_plain_call(matrix, v, kernel=call.kernel, can_use_cache=call.can_use_cache)
    if total is not None and not call.note:
        with suppress(Exception):  # of an unusual layout, in which the division is not followed
            adapter.divisor = table.restore(total.expand(*total.shape[:3], v.shape[3]), four, dims, result.shape)
    return call, adapter


def weigh_again(product_call: HandwrittenCall, table: AxisTable, groups: Groups, visible: Tensor, factor: float) -> Tensor:
    """Return the weights (b, h, q, k) of a call whose scores are changed. Raises UnreadableError if they are not known."""
    assert product_call.product is not None
    weights, dims = product_call.tensor, product_call.trace.dims
    assert dims is not None
    again = STATE.mode.weight_steps.run_again(weights, table, groups, visible, factor)
    return table.arrange(again, dims, groups.matrix) * product_call.product.factor


def describe(changes: tuple[str, ...]) -> str:
    """Return the names of functions in words."""
    return " and ".join(dict.fromkeys(changes)) or "an unknown function"


def build_call(
    product_call: HandwrittenCall, table: AxisTable, groups: Groups, matrix: Tensor, v: Tensor
) -> tuple[AttentionCall, Tensor | None]:
    """Return the call of which `matrix` (b, h, q, k) are the weights, and what its rows sum to where that is not 1.

    The call has the formula of its scores if that is known and gives these weights, else the weights as they are. Rows that do
    not sum to 1 are those of exponentials that are divided after the product, or of weights times a gate.
    """
    trace, kernel, reason = product_call.trace, f"by hand: {product_call.steps}", ""
    if trace.keys is not None and set(table.expand_axes(trace.keys)) != set(groups.keys):
        raise NoSoftmaxError("its softmax is not over the keys that the values are summed over")
    functions = (trace.function,) if trace.activated is None else (trace.function, *trace.activated.functions)
    has_exponentials = any(one in BASES for one in functions)
    is_exponential = has_exponentials and not trace.extent  # unlike that of a log_softmax
    made_by = {trace.function, *trace.changes}
    if made_by & MAXIMA_OF_TWO and made_by & BASES.keys():
        raise UnreadableError(UNFOLLOWED)  # an online softmax, over a block of keys
    divisor = None if not is_exponential or has_unit_rows(matrix, trace.eps) else matrix.sum(-1, keepdim=True)
    if trace.form is not None:
        try:
            call = resolve_form(trace.form, table, groups, kernel, v)
            softmax = matrix if divisor is None else matrix / divisor
            difference = compare_rows(call, softmax, trace.eps, trace.may_differ_by_row)
            if difference is not None and isinstance(call.bias, DistanceProducts):
                call = resolve_form(trace.form.drop_sources(), table, groups, kernel, v)
                difference = compare_rows(call, softmax, trace.eps, trace.may_differ_by_row)
            if difference is None:
                with_sinks = add_sinks(call, matrix, trace) if divisor is not None and trace.changes else None
                return (call, divisor) if with_sinks is None else (with_sinks, None)
            total = matrix.sum(-1, keepdim=True)
            is_softmax = has_exponentials or trace.activated is None  # else the weight of a single key may be anything
            may_have_factor = is_softmax and call.sinks is None
            if may_have_factor and compare_rows(call, matrix / total, trace.eps, trace.may_differ_by_row) is None:
                return replace(call, note=DIVIDED if has_exponentials else GATED), total
            reason = f"its formula differs from its weights by {difference:.2g}"
        except UnreadableError as error:
            reason = str(error)
    return store_weights(trace, matrix, v, kernel, reason or describe_unknown(product_call)), None


def describe_unknown(product_call: HandwrittenCall) -> str:
    """Return why there is no formula of the weights; functions that only changed the layout of scores are left out."""
    choice, changes = describe_choice(product_call.trace.changes), product_call.trace.changes
    changes = tuple(one for one in changes if one not in KEEPS_NUMBERS) or changes
    if choice:
        return f"it is {choice} attention"
    functions = describe(changes).rstrip(",")
    return f"its scores are made by {functions}" if changes else "its scores are no product of tokens with tokens"
