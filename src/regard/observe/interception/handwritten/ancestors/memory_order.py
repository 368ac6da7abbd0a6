"""The order in memory in which a layer wrote what was copied to another order since: how far apart entries were there."""

import itertools
import math
from collections.abc import Sequence

from regard.observe.interception.lookups import Copy


def find_strides_before(strides: Sequence[int], copy: Copy, repeats: bool) -> list[int] | None:
    """Return how far apart entries were in a tensor that was copied, by strides in the copy; None if that is not known.

    The copy may have another shape, or `repeats` the tensor, which then has the last of its axes.
    """
    if repeats:
        start = len(copy.shape) - len(copy.given_shape)
        own = [stride if size > 1 else 0 for stride, size in zip(copy.given_strides, copy.given_shape, strict=True)]
        before: list[int] | None = [0] * start + own
    else:
        before = regroup_strides(copy.given_shape, copy.given_strides, copy.shape)
    if before is None:
        return None
    axes = [axis for axis in zip(copy.strides, before, copy.shape, strict=True) if axis[2] > 1]
    found = []
    for stride in strides:
        after, one, _ = max((axis for axis in axes if axis[0] <= stride), default=(1, 0, 0))
        found.append(stride // max(after, 1) * one)
    return found


def regroup_strides(shape: Sequence[int], strides: Sequence[int], after: Sequence[int]) -> list[int] | None:
    """Return the strides that axes of another shape have in a tensor, those of the inner one where axes are joined.

    None if axes are joined and split at once, and not next to each other in memory.
    """
    found = [0] * len(after)
    own = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    left = [n for n, size in enumerate(after) if size != 1]
    while own and left:
        group, places = [own.pop()], [left.pop()]
        while (count := math.prod(size for size, _ in group)) != (total := math.prod(after[n] for n in places)):
            rest = own if count < total else left
            if not rest:
                return None
            if count < total:
                group.append(own.pop())
            else:
                places.append(left.pop())
        stride = group[0][1]
        is_one = all(outer[1] == inner[0] * inner[1] for inner, outer in itertools.pairwise(group))
        if len(places) > 1 and not is_one:
            return None
        for n in places:
            found[n], stride = stride, stride * after[n]
    return found
