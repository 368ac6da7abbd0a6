"""Batch and heads, in one axis or in two: some code makes (b h, t, d) or (b, h, t, d) of (b, t, h d), other code (h b, t, d).

The functions that made a tensor show which: a cat of one part for each head, or a view, a permutation and another view.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.lookups import JOINS_PARTS, PERMUTES_AXES, SPLITS, Layout
from regard.observe.interception.provenance import ModuleFrame, Operation, TensorOrRef

SAME_AXES = SPLITS | {"contiguous", "clone", "to", "float", "type", "type_as", "detach"}  # of a tensor and the result
STEPS = 32  # functions that are followed back, at most


class FoldedHeads(NamedTuple):
    """The number of heads in axes that they share with the batch, and whether they are before it: (h b), not (b h)."""

    heads: int
    is_before: bool


def find_folded_heads(frames: Sequence[ModuleFrame], x: TensorOrRef, places: tuple[int, ...] = (0,)) -> FoldedHeads | None:
    """Return the heads in the axes of batch and heads of a tensor, both in one or each in its own, by their places.

    None if the functions that made the tensor do not show them.
    """
    ref = weakref.ref(x) if isinstance(x, Tensor) else x
    for frame in reversed(frames):
        for _ in range(STEPS):
            made = frame.find_makers(ref)
            if not made:
                break  # an argument of the module
            maker = made[0]
            if maker.child is not None or maker.name == "linear":
                return FoldedHeads(1, is_before=False) if len(places) == 1 else None  # the axis is that of what it projects
            if len(made) > 1 or not maker.given:
                return None
            if maker.name in JOINS_PARTS and maker.layout is not None:
                axis, is_stack = find_joining_axis(maker.layout), maker.name == "stack"
                if is_stack or axis in places:
                    fits = axis in places and (is_stack or len(places) == 1) and are_heads(frame.find_makers(maker.given[0]))
                    return FoldedHeads(len(maker.given), axis == places[0]) if fits else None
                ref = maker.given[-1]  # as of a cache and new tokens
                continue
            found = find_places_before(maker, places)
            if found is None or isinstance(found, FoldedHeads):
                return found
            places, ref = found, maker.given[maker.sizes.index(max(maker.sizes))]
    return None


def find_joining_axis(layout: Layout) -> int:
    """Return the axis along which a function joined tensors."""
    _, after, args, kwargs = layout
    axis: int = kwargs["dim"] if "dim" in kwargs else args[0] if args else 0
    return axis % len(after)


def find_places_before(maker: Operation, places: tuple[int, ...]) -> tuple[int, ...] | FoldedHeads | None:
    """Return the places of some axes of a result in what it was made of, or the heads where that shows them; else None."""
    layout = None if maker.name in SPLITS else maker.layout
    if layout is None:
        if maker.along is not None:
            return tuple(n + (n >= maker.along[0]) for n in places)
        keeps = maker.name in SAME_AXES or infer_role(maker.name) in (Role.MULTIPLY, Role.ADD)
        return places if keeps else None
    before, after, args, kwargs = layout
    if 0 in before:
        return None
    if maker.name in PERMUTES_AXES | {"mT"}:
        order = find_order(maker.name, before, args, kwargs)
        return tuple(order[n] for n in places)
    whole = [find_whole_axis(before, after, n) for n in places]
    if None not in whole:
        return tuple(n for n in whole if n is not None)
    parts = [place for place, n in zip(places, whole, strict=True) if n is None]
    if len(parts) == 1 and math.prod(after[: parts[0]]) % math.prod(before[:-1]) == 0:  # a part of the channels
        return FoldedHeads(after[parts[0]], parts[0] == places[0])
    return find_joined_axes(before, after, places[0]) if len(places) == 1 else None


def find_order(name: str, shape: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[int]:
    """Return where the axes of the result of a function that permutes axes were before."""
    name, args = ("transpose", (-2, -1)) if name == "mT" else (name, args)
    if name.startswith(("transpose", "swap")) and len(args) == 2:  # torch itself takes longer, below
        order, (one, other) = [*range(len(shape))], args
        order[one], order[other] = order[other], order[one]
        return order
    sample = torch.empty_strided(shape, [*range(1, len(shape) + 1)], device="meta")
    return [stride - 1 for stride in getattr(Tensor, name)(sample, *args, **kwargs).stride()]


def are_heads(made: Sequence[Operation]) -> bool:
    """Return whether the functions that made a part are one that splits the channels, the last axis."""
    layout = made[0].layout if len(made) == 1 and made[0].name in SPLITS else None
    return layout is not None and layout[0][:-1] == layout[1][:-1]


def find_whole_axis(before: Sequence[int], after: Sequence[int], place: int) -> int | None:
    """Return the axis of a shape that an axis of another view of it is; None if it is a part of one or several."""
    first = math.prod(after[:place])
    same = (n for n, size in enumerate(before) if size == after[place] and math.prod(before[:n]) == first)
    return next(same, None)


def find_joined_axes(before: Sequence[int], after: Sequence[int], place: int) -> tuple[int, int] | FoldedHeads | None:
    """Return the two neighboring axes of a shape that a view of it joined to one; None if it did not.

    The heads if it joined an axis with a part of the channels, the last axis.
    """
    first = math.prod(after[:place])
    start = next((n for n in range(len(before) - 1) if math.prod(before[:n]) == first), None)
    if start is None or not before[start]:
        return None
    if before[start] * before[start + 1] == after[place]:
        return start, start + 1
    is_part = start + 2 == len(before) and after[place] % before[start] == 0
    return FoldedHeads(after[place] // before[start], is_before=False) if is_part else None
