"""The order in which a loop or a scan takes tokens, by their places in memory and by the indices that picked them."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.ancestor_search import find_ancestors
from regard.observe.interception.provenance import WEIGHT, ModuleFrame, Operation

REVERSALS = {"flip", "fliplr", "flipud", "rot90", "sort", "msort", "argsort", "take", "masked_select", "index_put"}


def are_out_of_order(parts: Sequence[Tensor]) -> bool:
    """Return whether tensors are different parts of one memory, one of them before an earlier one."""
    places, storages = [x.data_ptr() for x in parts], {x.untyped_storage().data_ptr() for x in parts}
    return len(storages) == 1 and len({*places}) == len(places) and places != sorted(places)


def is_increasing(places: Sequence[int]) -> bool:
    """Return whether each number is more than the one before."""
    return all(one < other for one, other in pairwise(places))


def list_picks(frame: ModuleFrame) -> list[list[int]]:
    """Return the indices of the entries that a module takes of each tensor, in the order in which it first uses them."""
    places, picked = dict[int, tuple[tuple[int, int], int]](), dict[tuple[int, int], dict[int, None]]()
    for one in frame.list_operations():
        for x in one.given:
            if id(x) in places:
                source, index = places[id(x)]
                picked.setdefault(source, {})[index] = None
        if one.along is None or not one.given:
            continue
        axis, shape = one.along
        if one.name == "__getitem__":
            how = one.shapes.how if one.shapes is not None else None
            found = [n % shape[axis] for n in (how if isinstance(how, tuple) else (how,)) if type(n) is int][:1]
        else:
            found = [*range(len(one.results))] if len(one.results) == shape[axis] else []
        places |= {id(y): ((id(one.given[0]), axis), index) for y, index in zip(one.results, found, strict=False)}
    return [[*index] for index in picked.values()]


def has_other_order(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether x was made of a tensor whose tokens may be in another order, which its map would have too."""
    moved = {id(y) for one in frame.list_operations() if may_move_tokens(frame, one) for y in one.results}
    return bool(moved) and not moved.isdisjoint(find_ancestors([frame], x))


def may_move_tokens(frame: ModuleFrame, operation: Operation) -> bool:
    """Return whether an operation may bring tokens to another order: a reversal or a look-up by an index.

    A look-up in a weight, along the features, or by an index that increases, does not.
    """
    name, lookup = operation.name.strip("_"), operation.lookup
    if name in REVERSALS:
        return True
    if lookup is None:  # an index that is a list has no shapes
        return name == "getitem" and operation.shapes is None
    if name == "embedding" or lookup.dim == -1 or frame.find_contents(operation.given[0]) == WEIGHT:
        return False
    rows = lookup.read_index()
    return rows is None or lookup.has_changed or bool((rows.diff() <= 0).any())
