"""The factors of the tokens of a loop, joined along an axis of time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.recurrences.state_loop import CHANGED, Factor
from regard.observe.interception.handwritten.recurrences.token_order import are_out_of_order
from regard.observe.interception.lookups import read_version
from regard.observe.interception.plain_tensors import UnreadableError

DIFFERS = "its tokens are written or read in different ways"
BACKWARDS = "it takes later tokens before earlier ones"


@dataclass(eq=False)
class TokenJoiner:
    """Joins the factors of several tokens along an axis of time, each series of tensors once."""

    table: AxisTable
    joined: dict[object, Factor] = field(default_factory=dict)
    times: dict[int, Axes] = field(default_factory=dict)  # by the number of tokens

    def join(self, parts: Sequence[Factor]) -> Factor:
        """Return the factors of all tokens as one, without an axis of time if they are the same tensor."""
        first, dims = parts[0], self.table.expand_dims(parts[0].dims)
        if any(self.table.expand_dims(one.dims) != dims or one.tensor.shape != first.tensor.shape for one in parts):
            raise UnreadableError(DIFFERS)
        if any(read_version(one.tensor) != one.version for one in parts):
            raise UnreadableError(CHANGED)
        keys = tuple(map(identify_factor, parts))
        if keys not in self.joined:
            if are_out_of_order([one.tensor for one in parts]):
                raise UnreadableError(BACKWARDS)
            is_same = len(set(keys)) == 1
            stacked = (
                first if is_same else Factor(torch.stack([one.tensor for one in parts]), (self.add_time(len(parts)), *dims))
            )
            self.joined[keys] = stacked
        return self.joined[keys]

    def join_all(self, rows: Sequence[Sequence[Factor]]) -> list[Factor]:
        """Return the factors of each token joined place by place."""
        if len({len(row) for row in rows}) > 1:
            raise UnreadableError(DIFFERS)
        return [self.join(column) for column in zip(*rows, strict=True)]

    def add_time(self, count: int) -> Axes:
        """Return the axis of a number of tokens."""
        if count not in self.times:
            self.times[count] = self.table.add_axis(count)
        return self.times[count]

    def multiply(self, factors: Sequence[Factor], groups: Dims) -> Tensor:
        """Return the product of factors, with a dimension for each group of axes."""
        first, *rest = (self.table.arrange(one.tensor, one.dims, groups) for one in factors)
        for x in rest:
            first = first * x
        return first

    def count(self, axes: Axes) -> int:
        """Return the number of entries along axes."""
        return prod(self.table.get_sizes(self.table.expand_axes(axes)))


def identify_factor(factor: Factor) -> tuple[object, ...]:
    """Return what two factors with the same numbers in the same memory have in common."""
    x = factor.tensor
    axes = [(axes, size, step) for axes, size, step in zip(factor.dims, x.shape, x.stride(), strict=True) if size > 1]
    return x.data_ptr(), x.dtype, *axes
