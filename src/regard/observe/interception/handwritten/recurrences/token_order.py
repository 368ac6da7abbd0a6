"""The order in which a loop or a scan takes tokens, by their places in memory and by the indices that picked them."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef, find_ancestors
from regard.observe.interception.lookups import SPLITS
from regard.observe.interception.provenance import WEIGHT, ModuleFrame, Operation

MAX_STEPS = 256  # back from what a token writes
REVERSALS = {"flip", "fliplr", "flipud", "rot90", "sort", "msort", "argsort", "take", "masked_select", "index_put"}


def are_out_of_order(parts: Sequence[Tensor]) -> bool:
    """Return whether tensors are different parts of one memory, one of them before an earlier one."""
    places, storages = [x.data_ptr() for x in parts], {x.untyped_storage().data_ptr() for x in parts}
    return len(storages) == 1 and len({*places}) == len(places) and places != sorted(places)


def is_increasing(places: Sequence[int]) -> bool:
    """Return whether each number is more than the one before."""
    return all(one < other for one, other in pairwise(places))


def are_taken_out_of_order(frame: ModuleFrame, series: Sequence[Sequence[TensorRef]]) -> bool:
    """Return whether a loop that takes one series of tensors for each token takes a later token before an earlier one.

    So it does if a function of the module brought tokens to another order before.
    """
    return TokenPicks(frame, len(series)).takes_later_first(series) or any(has_other_order(frame, x) for x in series[-1])


class TokenPicks:
    """The tensors of single tokens, or of a few, that functions took of longer tensors in a module, by their first index."""

    def __init__(self, frame: ModuleFrame, tokens: int) -> None:
        self.frame = frame
        self.picks: dict[int, tuple[int, int]] = {}  # the id of the longer tensor and the index, by the id of the result
        for one in frame.list_operations():
            if one.given and one.child is None and (indices := find_indices(one, tokens)):
                found = zip(one.results, indices, strict=False)
                self.picks |= {id(y): (id(one.given[0]), n) for y, n in found if frame.find_contents(one.given[0]) != WEIGHT}

    def takes_later_first(self, series: Sequence[Sequence[TensorRef]]) -> bool:
        """Return whether a loop that takes one series of tensors after another takes some token before an earlier one.

        Of tensors that no function of the module made of picks, as those of a module that it calls, the order of their first
        use counts.
        """
        places = dict[int, list[int]]()
        for tensors in series:
            for source, index in self.find_last(tensors).items():
                places.setdefault(source, []).append(index)
        known = [one for one in places.values() if len(one) >= len(series) - 1]
        used = [one for one in self.list_used() if len(one) >= len(series) - 1]
        return any(one != sorted(one) for one in known) if known else not all(map(is_increasing, used))

    def find_last(self, tensors: Sequence[TensorRef]) -> dict[int, int]:
        """Return the last index that some tensors were made of in each longer tensor, by its id."""
        found, waiting, seen = dict[int, int](), [*tensors], set[int]()
        while waiting and len(seen) < MAX_STEPS:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if id(one) in self.picks:
                source, index = self.picks[id(one)]
                found[source] = max(index, found.get(source, index))
            else:
                waiting += [x for maker in self.frame.find_makers(one) for x in maker.given]
        return found

    def list_used(self) -> list[list[int]]:
        """Return the indices that the module took of each longer tensor, in the order in which it first used them."""
        used = dict[int, dict[int, None]]()
        for one in self.frame.list_operations():
            for source, index in (self.picks[id(x)] for x in one.given if id(x) in self.picks):
                used.setdefault(source, {})[index] = None
        return [[*indices] for indices in used.values()]


def find_indices(operation: Operation, tokens: int) -> list[int]:
    """Return the first index of each result along the axis of this length that a function cuts; none if it cuts none."""
    name, results, how = operation.name.strip("_"), operation.results, operation.shapes and operation.shapes.how
    if operation.lookup is not None:
        rows = operation.lookup.read_index() if operation.lookup.size == tokens else None
        return [] if rows is None or not 0 < rows.shape[-1] < tokens else [int(rows.flatten()[0]) % tokens]
    if name == "getitem" and operation.shapes is not None:
        entries, shape = how if isinstance(how, tuple) else (how,), [*operation.shapes.given[0]]
        own = [one for one in entries if one is not None and one is not Ellipsis]
        front = next((n for n, one in enumerate(x for x in entries if x is not None) if one is Ellipsis), len(own))
        axes = [*range(front), *range(len(shape) - len(own) + front, len(shape))]
        cuts = [(one, shape[axis]) for one, axis in zip(own, axes, strict=False) if one != slice(None)]
        return [one % n if type(one) is int else one.indices(n)[0] for one, n in cuts if n == tokens][:1]
    if name in ("select", "narrow") and operation.shapes is not None and how is not None:
        size = operation.shapes.given[0][how[0]]
        return [how[1] % size] if size == tokens else []
    if operation.along is not None and len(results) == operation.along[1][operation.along[0]] == tokens:
        return [*range(tokens)]
    if name in SPLITS and operation.layout is not None and len(results) > 1 and tokens in operation.layout[0]:
        axis = next((n for n, size in enumerate(operation.layout[0]) if size != operation.layout[1][n]), None)
        return [*range(len(results))] if axis is not None and operation.layout[0][axis] == tokens else []
    return []


def has_other_order(frame: ModuleFrame, x: Tensor | TensorRef) -> bool:
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
