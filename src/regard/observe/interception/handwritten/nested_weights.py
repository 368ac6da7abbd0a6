"""Attention written out on nested tensors, whose scores and weights are found, but not read: it is reported as missed."""

import weakref
from typing import Any

from torch import Tensor

from regard.observe.interception.function_roles import Role, strip_affixes
from regard.observe.interception.handwritten.handwritten_call import HandwrittenCall
from regard.observe.interception.handwritten.products.traces import Trace, TraceKind, Traces
from regard.observe.interception.tensor_arguments import find_tensors

NESTED = (
    "its tensors are nested, and products of these by hand are not followed; F.scaled_dot_product_attention on them is recorded"
)


def has_nested(args: Any, result: Any) -> bool:
    """Return whether the result of a function is a nested tensor, or a tensor made of one."""
    return isinstance(result, Tensor) and (result.is_nested or any(isinstance(x, Tensor) and x.is_nested for x in args))


def follow_nested(tracker: Traces, name: str, role: Role | None, args: Any, kwargs: Any, y: Tensor) -> HandwrittenCall | None:
    """Follow a function of nested tensors; return the call of attention that it completes, which cannot be read, or None.

    Scores are products of two nested tensors, and weights their softmax, or one over the tokens of each sequence.
    """
    nested = [x for x in find_tensors(args, kwargs) if x.is_nested]
    traced = tracker.find_all(nested)
    start = Trace(weakref.ref(y), TraceKind.SCORES, pairs=True, roots=0, size=0, dims=())
    x, trace = max(traced, key=lambda one: one[1].kind, default=(y, start))
    core = strip_affixes(name)
    sums = (role is Role.PRODUCT and trace.kind is TraceKind.WEIGHTS) or (role is Role.SUM and trace.kind is TraceKind.WEIGHTED)
    if sums and traced:
        tracker.drop(x)
        steps = f"{trace.function} and {core}" if role is Role.PRODUCT else f"{trace.function}, mul and {core}"
        return HandwrittenCall(steps, trace, x, None, 0, NESTED)
    if not y.is_nested:
        return None
    if role is Role.SOFTMAX and (traced or is_over_tokens(args, kwargs, y)):
        tracker.put(y, trace._replace(kind=TraceKind.WEIGHTS, function=core))
    elif role is Role.MULTIPLY and trace.kind is TraceKind.WEIGHTS and y.numel() > x.numel():
        tracker.put(y, trace._replace(kind=TraceKind.WEIGHTED))
    elif traced or (role is Role.PRODUCT and len(nested) > 1):
        tracker.put(y, trace)
    return None


def is_over_tokens(args: Any, kwargs: Any, y: Tensor) -> bool:
    """Return whether a softmax of a jagged tensor y is over the axis in which its sequences differ."""
    axis, ragged = kwargs.get("dim", args[1] if len(args) > 1 else None), getattr(y, "_ragged_idx", None)
    return type(axis) is int and axis % y.dim() == ragged
