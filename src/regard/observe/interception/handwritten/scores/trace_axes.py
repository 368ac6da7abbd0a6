"""The axes of what functions make of scores and weights, and the formula of scores as far as it is known."""

from typing import Any

from torch import Tensor

from regard.observe.interception.function_roles import BASES, Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.products.score_form import (
    PERMUTES,
    SAME,
    VIEWS,
    extend_form,
    follow_dims,
    is_inactive_dropout,
)
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import Trace, Traced, TraceKind, list_parts
from regard.observe.interception.handwritten.scores.head_mixing import describe_mixing
from regard.observe.interception.handwritten.scores.row_edits import may_edit_scores, may_edit_weights
from regard.observe.interception.provenance import is_in_place

LAYOUT_OR_SAME = VIEWS | PERMUTES | SAME | {"getitem"}


def follow_axes(
    table: AxisTable,
    trace: Trace,
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    x: Tensor,
    traced: list[Traced],
    results: list[Tensor],
) -> Trace:
    """Return the trace of a function's result with its axes, and with its formula if these are scores."""
    y, changes = results[0], (*trace.changes, strip_affixes(name))
    dims = None
    if trace.dims is not None and len(results) == 1:
        dims = follow_dims(table, trace.dims, name, func, args, kwargs, x, y)
    if dims is None:
        return trace._replace(dims=None, form=None, relative=None, undropped=None, changes=changes)
    if trace.kind is TraceKind.SCORES or trace.function == "tanh":  # bounded scores, not yet weights
        others = [one for v, one in traced if v is not x]
        other = (others[0].form or others[0].relative) if others else None
        form, relative = (
            None if one is None else extend_form(table, one, name, args, kwargs, x, dims, other)
            for one in (trace.form, trace.relative)
        )
        has_edits = trace.has_edits or may_edit_scores(name, args, kwargs, x, y)
        is_softmax = trace.extent > 0 and strip_affixes(name) in BASES  # of logarithms
        changes = trace.changes if form is not None or is_softmax else changes
        return trace._replace(dims=dims, form=form, relative=relative, changes=changes, has_edits=has_edits)
    added_weights = [one for v, one in traced if v is not x and one.kind is TraceKind.WEIGHTS]
    if added_weights and infer_role(name) is Role.ADD:
        return add_weights(table, trace, name, dims, added_weights)
    if infer_role(name) is Role.CONVOLUTION:
        is_pointwise = len(args) > 1 and args[1].shape[2:].numel() == 1
        changes = (*trace.changes, describe_mixing(name, x, y) if is_pointwise else name)
        return trace._replace(
            dims=dims, form=None, relative=None, moved=None, undropped=None, parts=list_parts(trace), changes=changes
        )
    if strip_affixes(name) == "dropout":
        trace = trace._replace(dims=dims)
        return trace if is_inactive_dropout("dropout", args, kwargs) else keep_undropped(trace, x)
    undropped = trace.undropped
    if undropped is not None and undropped[1] is not None:
        before = undropped[0].clone() if is_in_place(name) else undropped[0]
        again = follow_dims(table, undropped[1], name, func, (before, *args[1:]), kwargs, before, y)
        undropped = None if again is None else (func(before, *args[1:], **kwargs).detach(), again)
    is_same = strip_affixes(name) in LAYOUT_OR_SAME or name in LAYOUT_OR_SAME
    has_edits = trace.has_edits or may_edit_weights(name, args, trace, x, y)
    if is_same and undropped is trace.undropped and dims == trace.dims and has_edits == trace.has_edits:
        return trace
    changes = trace.changes if is_same else changes
    return trace._replace(dims=dims, undropped=undropped, changes=changes, has_edits=has_edits)


def add_weights(table: AxisTable, trace: Trace, name: str, dims: Dims, others: list[Trace]) -> Trace:
    """Return the trace of the sum or difference of several weights, made of the softmaxes of all of them."""
    parts = list_parts(trace)
    for one in others:
        is_same = one.dims is not None and len(one.dims) == len(dims) and table.identify(dims, one.dims)
        parts = (*parts, *list_parts(one)) if parts and is_same and list_parts(one) else ()
    changes = (*trace.changes, strip_affixes(name))
    return trace._replace(dims=dims, form=None, moved=None, undropped=None, parts=parts, changes=changes)


def keep_undropped(trace: Trace, x: Tensor) -> Trace:
    """Return the trace of dropped weights with the weights x before dropout."""
    return trace if trace.undropped or trace.dims is None else trace._replace(undropped=(x.detach(), trace.dims))
