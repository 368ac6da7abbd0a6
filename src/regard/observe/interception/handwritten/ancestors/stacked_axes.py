"""Axes along which outputs of layers or experts were stacked, found back from a tensor: they are no axes of tokens.

What was stacked are tokens where each part was made of a token of its own, as a loop over the tokens of one tensor picks them.
"""

import math
import weakref

from torch import Tensor

from regard.observe.interception.folded_heads import find_joining_axis
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef, walk_back
from regard.observe.interception.handwritten.ancestors.row_provenance import STEPS, Place, RowSearch, fit_dims, list_makers
from regard.observe.interception.handwritten.ancestors.token_factors import is_layer
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.lookups import JOINS_PARTS, SPLITS
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation

REDUCTIONS = {"sum", "mean", "amax", "max"}


def are_stacked_tokens(frames: list[ModuleFrame], x: Tensor, places: list[int]) -> bool | None:
    """Return whether what was stacked along dimensions of x is tokens, not outputs of layers; None if nothing was."""
    table = AxisTable()
    place, search = Place(weakref.ref(x), table.add_dims(x.shape)), RowSearch(table)
    own = [axis for n in places for axis in place.dims[n]]
    for n, frame in reversed([*enumerate(frames)]):
        for _ in range(STEPS):
            makers = list_makers(frame, place.tensor)
            written = list_written_parts(frame, place.tensor, math.prod(table.get_sizes(table.expand_axes((*own,)))))
            if written:
                return hold_picked_tokens(frames[: n + 1], written)
            if not makers:
                break  # an argument of the module
            if is_stack(table, makers[-1], place.dims, {*table.expand_axes((*own,))}):
                return hold_picked_tokens(frames[: n + 1], makers[-1].given)
            step = step_through_layer(table, makers[-1], place.dims) or step_through_reduction(table, makers[-1], place.dims)
            before = step or search.step_back(frame, makers[-1], place.dims)
            if before is None:
                return None
            place = before
    return None


def has_stacked_layers(frames: list[ModuleFrame], x: Tensor) -> bool:
    """Return whether outputs of layers or experts were stacked along an axis of x before its last."""
    return any(are_stacked_tokens(frames, x, [n]) is False for n in range(x.dim() - 1))


def list_written_parts(frame: ModuleFrame, x: TensorRef, count: int) -> list[TensorRef]:
    """Return the tensors that were written into x, if they are so many and fill it, as outputs of layers in a loop do."""
    writes = [one for one in frame.find_makers(x) if one.name == "__setitem__" and one.given[0] is x]
    fills = len(writes) == count and all(one.sizes[0] == count * one.sizes[-1] for one in writes)
    return [one.given[-1] for one in writes] if fills and count > 1 else []


def is_stack(table: AxisTable, maker: Operation, dims: Dims, own: set[int]) -> bool:
    """Return whether an operation stacked tensors along axes `own` of its result, or joined them as if it had."""
    if maker.name not in JOINS_PARTS or maker.layout is None:
        return False
    (before, after, *_), fitted = maker.layout, fit_dims(dims, len(maker.layout[1]))
    axis, count = find_joining_axis(maker.layout), len(maker.given)
    if fitted is None or count < 2:
        return False
    joined = table.expand_axes(fitted[axis])
    if maker.name == "stack" or (before[axis] == 1 and after[axis] == count):
        return bool(own) and {*joined} == own
    return len(joined) > 1 and {joined[0]} == own and table.get_sizes(joined[:1]) == [count]


def step_through_layer(table: AxisTable, maker: Operation, dims: Dims) -> Place | None:
    """Return what a layer that changes the last axis alone was given, with the axes of its dimensions; None for any other."""
    is_child = maker.child is not None and is_layer(maker)
    if len(dims) < 2 or not (is_child or maker.name == "linear"):
        return None
    rows = 1
    for size in table.get_sizes([axis for axes in table.expand_dims(dims[:-1]) for axis in axes]):
        rows *= size
    return Place(maker.given[0], (*dims[:-1], table.add_axis(maker.sizes[0] // max(rows, 1))))


def step_through_reduction(table: AxisTable, maker: Operation, dims: Dims) -> Place | None:
    """Return what a sum, mean or maximum over one axis was given, with the axes of its dimensions; None for any other."""
    if maker.name not in REDUCTIONS or type(maker.dim) is not int or not maker.given:
        return None
    rest = math.prod(table.get_sizes([axis for axes in table.expand_dims(dims) for axis in axes]))
    reduced = table.add_axis(maker.sizes[0] // max(rest, 1))
    place = maker.dim % len(dims) if dims else 0
    if dims and not dims[place]:  # a dimension of size 1 was left, or stood here before
        return Place(maker.given[0], (*dims[:place], reduced, *dims[place + 1 :]))
    place = maker.dim % (len(dims) + 1)
    return Place(maker.given[0], (*dims[:place], reduced, *dims[place:]))


def hold_picked_tokens(frames: list[ModuleFrame], parts: list[TensorRef]) -> bool:
    """Return whether each of several tensors was made of other tokens of one tensor than the others, learned ones aside.

    The first and the last ones stand for all.
    """
    parts = [one for one in parts if frames[-1].find_contents(one) == TOKEN]
    picked = [find_picks(frames, one) for one in (*parts[:2], *parts[2:][-2:])]
    for source in set[int]().union(*picked):
        sets = {frozenset(one.get(source, ())) for one in picked}
        if frozenset() not in sets and len(sets) == len(picked):
            return True
    return False


def find_picks(frames: list[ModuleFrame], x: TensorRef) -> dict[int, set[int]]:
    """Return the ids of the parts that x was made of, and that were cut out of a tensor along its tokens, by its id."""
    picks = dict[int, set[int]]()
    for _, (one, _), makers in walk_back(frames, (x, 0), lambda *_: True):
        for maker in makers:
            if maker.given and cuts_tokens(maker, one):
                picks.setdefault(id(maker.given[0]), set()).add(id(one))
    return picks


def cuts_tokens(maker: Operation, y: TensorRef) -> bool:
    """Return whether an operation cut its result y out of a tensor, along another axis than the last."""
    if maker.along is not None:
        axis, shape = maker.along
        return axis < len(shape) - 1
    if maker.lookup is not None:
        return maker.lookup.dim != -1
    if maker.name in SPLITS and maker.layout is not None:
        before, _, args, kwargs = maker.layout
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return type(dim) is int and dim % len(before) < len(before) - 1
    result = y()
    return maker.name in ("__getitem__", "narrow") and maker.dim != -1 and (result is None or result.numel() < maker.sizes[0])
