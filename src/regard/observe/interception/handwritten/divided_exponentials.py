"""A softmax that a layer writes out, of scores that nothing follows: exponentials, divided by their own sums."""

import weakref
from typing import Any

from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestor_search import TensorRef
from regard.observe.interception.handwritten.edge_softmax import skip_layouts
from regard.observe.interception.handwritten.score_form import QUOTIENTS
from regard.observe.interception.provenance import ModuleFrame, Operation


def may_divide_by_sums(name: str, args: Any) -> bool:
    """Return whether a function of this name divides a tensor by a smaller one: quick, for the many functions."""
    is_quotient = strip_affixes(name) in QUOTIENTS and len(args) == 2
    return is_quotient and all(isinstance(x, Tensor) for x in args) and args[1].numel() < args[0].numel()


def find_divided_exponentials(frame: ModuleFrame, name: str, args: Any) -> tuple[TensorRef, int] | None:
    """Return the scores whose exponentials a function of this name divides by their own sums, and the axis of these sums.

    The largest score may have been taken from all, and a number added to the sums.
    """
    axis = find_axis(*args) if may_divide_by_sums(name, args) else None
    if axis is None:
        return None
    exponentials, sums = (skip_layouts(frame, weakref.ref(x)) for x in args)
    if sums is not None and infer_role(sums.name) is Role.ADD and len(sums.given) == 1:
        sums = skip_layouts(frame, sums.given[0])
    terms = None if sums is None or strip_affixes(sums.name) != "sum" else skip_layouts(frame, sums.given[0])
    if exponentials is None or terms is None or not (is_exponential(exponentials) and is_exponential(terms)):
        return None
    scores = exponentials.given[0]
    return (skip_shift(frame, scores), axis) if scores is terms.given[0] else None


def find_axis(x: Tensor, sums: Tensor) -> int | None:
    """Return the only axis of x, of several entries, over which its sums were computed; None if there is another one."""
    sizes = [1] * (x.dim() - sums.dim()) + [*sums.shape]
    axes = [n for n, (size, other) in enumerate(zip(x.shape, sizes, strict=False)) if size > other == 1]
    return axes[0] if len(axes) == 1 else None


def is_exponential(maker: Operation) -> bool:
    """Return whether an operation computes exponentials."""
    return strip_affixes(maker.name) in ("exp", "exp2")


def skip_shift(frame: ModuleFrame, scores: TensorRef) -> TensorRef:
    """Return scores as they were before fewer numbers, as the largest of each row, were subtracted: no softmax sees these."""
    maker = skip_layouts(frame, scores)
    is_shifted = maker is not None and strip_affixes(maker.name) in ("sub", "subtract") and len(maker.sizes) == 2
    return maker.given[0] if maker is not None and is_shifted and maker.sizes[0] > maker.sizes[1] else scores
