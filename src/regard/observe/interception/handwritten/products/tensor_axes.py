"""Axes of followed tensors: which axes of a product each dimension holds, through views, permutations and broadcasts."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.functions.distributed_tensors import RankSplit
from regard.observe.interception.plain_tensors import UNFOLLOWED, UnreadableError, unwrap_tensor

Axes = tuple[int, ...]  # numbers of axes, outermost first; an axis of size 1 is left out
Dims = tuple[Axes, ...]  # the axes that each dimension of a tensor holds


class AxisTable:
    """The sizes of the axes of one forward, and the axes that a view split them into."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.parts: dict[int, Axes] = {}  # outer and inner part of a split axis, or the axis that one is the same as
        self.rank_split: RankSplit | None = None  # of the call that is read, if its tensors are split among ranks

    def clear(self) -> None:
        """Forget all axes."""
        self.sizes.clear()
        self.parts.clear()

    def add_axis(self, size: int) -> Axes:
        """Return a new axis of this size; none for size 1."""
        if size == 1:
            return ()
        number = len(self.sizes)
        self.sizes[number] = size
        return (number,)

    def add_dims(self, shape: Sequence[int]) -> Dims:
        """Return a new axis for each dimension of a shape."""
        return tuple(self.add_axis(size) for size in shape)

    def expand_axes(self, axes: Axes) -> Axes:
        """Return axes with those that were split replaced by their parts."""
        if self.parts.keys().isdisjoint(axes):
            return axes
        parts: list[int] = []
        for axis in axes:
            parts += self.expand_axes(self.parts[axis]) if axis in self.parts else [axis]
        return tuple(parts)

    def expand_dims(self, dims: Dims) -> Dims:
        """Return dimensions with axes that were split replaced by their parts."""
        return tuple(map(self.expand_axes, dims)) if self.parts else dims

    def get_sizes(self, axes: Sequence[int]) -> list[int]:
        """Return the sizes of axes."""
        return [*map(self.sizes.__getitem__, axes)]

    def regroup(self, dims: Dims, shape: Sequence[int]) -> Dims | None:
        """Return the axes of a tensor's dimensions after a view to another shape; None if they cannot be told apart."""
        remaining_axes = [axis for axes in self.expand_dims(dims) for axis in axes]
        new_dims = []
        for size in shape:
            axes: list[int] = []
            while size > 1:
                if not remaining_axes:
                    return None
                axis = remaining_axes.pop(0)
                if not self.sizes[axis]:
                    return None
                if size % self.sizes[axis]:
                    if self.sizes[axis] % size:
                        return None
                    axis, inner = self.split_axis(axis, size)
                    remaining_axes.insert(0, inner)
                axes.append(axis)
                size //= self.sizes[axis]
            new_dims.append(tuple(axes))
        return None if remaining_axes else tuple(new_dims)

    def split_axis(self, axis: int, outer: int) -> tuple[int, int]:
        """Split an axis into an outer part of a size and an inner part; return both."""
        (one,), (other,) = self.add_axis(outer), self.add_axis(self.sizes[axis] // outer)
        self.parts[axis] = one, other
        return one, other

    def identify(self, dims: Dims, others: Dims) -> bool:
        """Make the axes of two tensors of one shape the same ones; return whether they could be.

        Those of a tensor and its transpose could not: two axes of one tensor are never the same.
        """
        ours, theirs = self.expand_dims(dims), self.expand_dims(others)
        if list(map(self.get_sizes, ours)) != list(map(self.get_sizes, theirs)):
            return False
        own, of_others = itertools.chain(*ours), itertools.chain(*theirs)
        different = {other: axis for axis, other in zip(own, of_others, strict=True) if axis != other}
        if different.keys() & set(itertools.chain(*ours)) or set(different.values()) & set(itertools.chain(*theirs)):
            return False
        self.parts |= {other: (axis,) for other, axis in different.items()}
        return True

    def align(self, dims: Dims, shape: Sequence[int]) -> Dims | None:
        """Return the dimensions of a tensor after it was broadcast to a shape; None if it was not.

        New axes are added for what was expanded.
        """
        if len(dims) > len(shape):
            return None
        new_dims = []
        for axes, size in zip(((),) * (len(shape) - len(dims)) + dims, shape, strict=True):
            if axes and math.prod(self.get_sizes(self.expand_axes(axes))) != size:
                return None
            new_dims.append(axes or self.add_axis(size))
        return tuple(new_dims)

    @contextmanager
    def use_rank_split(self, rank_split: RankSplit | None) -> Iterator[None]:
        """Arrange this rank's parts of tensors, and give the sizes of these, while the context is active."""
        before = self.sizes
        if rank_split is not None:
            self.sizes = before | {axis: span.length for axis, span in rank_split.spans.items()}
        self.rank_split = rank_split
        try:
            yield
        finally:
            self.sizes, self.rank_split = self.sizes | before, None

    def arrange(self, x: Tensor, dims: Dims, groups: Dims, shared: int | None = None) -> Tensor:
        """Return a tensor with one dimension for each group of axes, of size 1 where it has none of the group.

        A group of which it has some axes is expanded, except the group `shared`, if it lacks only the innermost of them.
        Raises UnreadableError if it has an axis that is in no group.
        """
        dims, groups = self.expand_dims(dims), self.expand_dims(groups)
        if dims == groups and self.rank_split is None:
            plain: Tensor = unwrap_tensor(x)
            return plain
        have = [*itertools.chain.from_iterable(dims)]
        places = dict(zip(have, itertools.count(), strict=False))
        order = [places[axis] for axis in itertools.chain.from_iterable(groups) if axis in places]
        if len(order) < len(have):
            raise UnreadableError(UNFOLLOWED)
        rank_split = self.rank_split
        x = unwrap_tensor(x if rank_split is None else rank_split.take_part(x, dims, self.sizes))
        if order != [*range(len(have))]:
            x = x.reshape(self.get_sizes(have)).permute(order)
        have_all_or_none = (places.keys() >= set(group) or places.keys().isdisjoint(group) for group in groups)
        if all(have_all_or_none):  # nothing is expanded
            return x.reshape([math.prod([self.sizes[axis] for axis in group if axis in places]) for group in groups])
        sizes, before, after = [], [], []  # of groups; of their axes, before and after those that x lacks are expanded
        for n, group in enumerate(groups):
            has_axis = [axis in places for axis in group]
            keeps = not any(has_axis) or (n == shared and has_axis == sorted(has_axis, reverse=True))
            size = 1
            for axis, there in zip(group, has_axis, strict=True):
                own = self.sizes[axis]
                before.append(own if there else 1)
                after.append(own if there or not keeps else 1)
                size *= after[-1]
            sizes.append(size)
        return (x.reshape(before).expand(after) if before != after else x).reshape(sizes)

    def restore(self, x: Tensor, groups: Dims, dims: Dims, shape: Sequence[int]) -> Tensor:
        """Return a tensor with one dimension for each group as a tensor of other dimensions and a shape: undo `arrange`."""
        groups = self.expand_dims(groups)
        have = [axis for group in groups for axis in group]
        order = [have.index(axis) for axes in self.expand_dims(dims) for axis in axes]
        return x.reshape(self.get_sizes(tuple(have))).permute(order).reshape(shape)


def find_permutation(x: Tensor, function: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the dimension of x that each dimension of function(x) is, for a function that only permutes dimensions."""
    sample = torch.empty_strided(x.shape, [1 + n for n in range(x.dim())], device="meta")
    return [stride - 1 for stride in function(sample, *args[1:], **kwargs).stride()]
