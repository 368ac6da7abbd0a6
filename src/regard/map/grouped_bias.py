"""Biases of groups of keys: of a query's entries only one number is stored for each group of keys, not for each key.

The decomposed relative positions of images (MViT, SAM) add a number for the row of a key and one for its column. The segments
of XLNet are groups as they are.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.map.computed_bias import NumberedBias

SMALLER = 4  # times as many keys as numbers of a query must a bias have
ROUNDING = 4  # times the rounding of the largest seen entry of a query, by which a sum of two numbers may differ from an entry
HIDDEN = 100.0  # below the largest entry of a query: smaller ones hide keys, as -1e9 does, and their rounding does not count
PRECISE = (torch.float32, torch.float64)  # in which that is no more than the rounding of scores


class GroupedBias(NumberedBias):
    """A bias (..., q, k) whose entry of query i and key j is the sum of numbers[i, n] over the groups n of key j.

    Its slices, rows, entries and heads are found by the groups; any other function of torch takes it as an ordinary tensor.
    """

    has_sums = True
    numbers: Tensor  # (..., q, n)
    groups: Tensor  # (m, k), the groups of each key

    @staticmethod
    def __new__(cls, numbers: Tensor, groups: Tensor) -> "GroupedBias":
        """Build the bias of the numbers of groups, of which each key has as many."""
        shape = *numbers.shape[:-1], groups.shape[-1]
        found: GroupedBias = Tensor._make_wrapper_subclass(cls, shape, dtype=numbers.dtype, device=numbers.device)
        found.numbers, found.groups = numbers, groups
        return found

    def copy_with(self, numbers: Tensor) -> "GroupedBias":
        return GroupedBias(numbers, self.groups.to(numbers.device))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the numbers, without repeats along axes that are expanded, and of the groups."""
        return super().nbytes + self.groups.nbytes

    def bound(self) -> float:
        """Return a bound of the size of the entries."""
        return len(self.groups) * super().bound()

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        return add_groups(self.numbers.index_select(-1, one) for one in self.groups)

    def select_spans(self, leading: tuple[Any, ...], rows: slice, columns: slice) -> Tensor:
        return GroupedBias(self.numbers[(*leading, rows)], self.groups[:, columns])

    def read_entries(self, leading: tuple[Any, ...], rows: Tensor, columns: Tensor) -> Tensor:
        return add_groups(self.numbers[(*leading, rows, one[columns])] for one in self.groups)


def add_groups(parts: Iterator[Tensor]) -> Tensor:
    """Return the sum of the numbers of each group that keys have."""
    total = next(parts)
    for x in parts:
        total = total + x
    return total


def group_keys(bias: Tensor) -> GroupedBias | None:
    """Return a bias (..., q, k) by the groups of its keys; None if there are too many groups."""
    if bias.dtype not in PRECISE or not bias.numel() or bias.shape[-2] < SMALLER:
        return None
    found = find_equal_columns(bias)
    return find_image(bias) if found is None else found


def find_equal_columns(bias: Tensor) -> GroupedBias | None:
    """Return the bias of keys that have equal columns; None if there are too many different ones."""
    last = bias[..., -1, :].flatten(0, -2) if bias.dim() > 2 else bias[-1:]
    count = len(last[0].unique())
    if count * SMALLER > last.shape[1]:
        return None
    columns, groups = last.unique(dim=1, return_inverse=True)
    first = torch.full((columns.shape[1],), last.shape[1], device=bias.device)
    first.scatter_reduce_(0, groups, torch.arange(len(groups), device=bias.device), "amin")
    found = GroupedBias(bias[..., first], groups[None])
    is_smaller = columns.shape[1] * SMALLER <= last.shape[1]
    return found if is_smaller and all(map(torch.equal, list_matrices(found.to_dense()), list_matrices(bias))) else None


def find_image(bias: Tensor) -> GroupedBias | None:
    """Return the bias of keys that are the pixels of an image, perhaps behind a class token, by their rows and columns.

    None if an entry is no sum of a number for the row of its key and one for the column.
    """
    keys = bias.shape[-1]
    for first in (0, 1):
        pixels = keys - first
        for width in range(2, pixels // 2 + 1):
            height = pixels // width
            if pixels % width or (height + width + 2 * first) * SMALLER > keys:
                continue
            tokens, image = bias[..., :first], bias[..., first:].unflatten(-1, (height, width))
            if not (
                is_row_plus_column(image[(0,) * (bias.dim() - 2)][-1]) and all(map(is_row_plus_column, list_matrices(image, 3)))
            ):
                continue
            rows, columns = image[..., 0], image[..., 0, :] - image[..., 0, :1]
            places = torch.arange(pixels, device=bias.device)
            groups = torch.stack([places // width, places % width + height])
            if first:  # with a group of its own, and one of 0
                own = torch.tensor([[height + width], [height + width + 1]], device=bias.device)
                groups, tokens = torch.cat([own, groups], 1), torch.cat([tokens, torch.zeros_like(tokens)], -1)
            return GroupedBias(torch.cat([rows, columns, tokens], -1), groups)
    return None


def is_row_plus_column(image: Tensor) -> bool:
    """Return whether entries (..., rows, columns) are sums of a number for each row and one for each column."""
    expected = image[..., :1] + (image[..., :1, :] - image[..., :1, :1])
    entries, difference = image.flatten(-2), (expected - image).abs().flatten(-2).amax(-1)
    is_seen = entries >= entries.amax(-1, keepdim=True) - HIDDEN
    tolerance = ROUNDING * torch.finfo(image.dtype).eps * entries.abs().where(is_seen, 0).amax(-1)
    return bool((difference <= tolerance).all())  # False for NaN, and for infinite entries


def list_matrices(x: Tensor, axes: int = 2) -> Iterator[Tensor]:
    """Return the tensors of the last axes of x, one by one."""
    return iter(x.flatten(0, -axes - 1) if x.dim() > axes else x[None])
