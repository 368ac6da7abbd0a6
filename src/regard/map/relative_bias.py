"""Biases that depend on the distance from query to key alone, as T5's: stored by their diagonals, a vector for each head."""

from typing import Any

import torch
from torch import Tensor

from regard.map.computed_bias import NumberedBias

SMALLER = 4  # times as many entries as its diagonals must a bias have


class RelativeBias(NumberedBias):
    """A bias (..., q, k) of which only the diagonals, `numbers` (..., q + k - 1), are stored.

    The entry of query i and key j is numbers[j - i + q - 1]. Its slices, rows, entries and heads are found by the diagonals;
    any other function of torch takes it as an ordinary tensor.
    """

    @staticmethod
    def __new__(cls, diagonals: Tensor, queries: int) -> "RelativeBias":
        """Build the bias of `queries` queries."""
        shape = *diagonals.shape[:-1], queries, diagonals.shape[-1] - queries + 1
        found: RelativeBias = Tensor._make_wrapper_subclass(cls, shape, dtype=diagonals.dtype, device=diagonals.device)
        found.numbers = diagonals
        return found

    def copy_with(self, numbers: Tensor) -> "RelativeBias":
        return RelativeBias(numbers, self.shape[-2])

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        return self.numbers.unfold(-1, self.shape[-1], 1).flip(-2)

    def select_spans(self, leading: tuple[Any, ...], rows: slice, columns: slice) -> Tensor:
        queries = self.shape[-2]
        distances = slice(columns.start - rows.stop + queries, columns.stop - rows.start + queries - 1)
        return RelativeBias(self.numbers[(*leading, distances)], rows.stop - rows.start)

    def read_entries(self, leading: tuple[Any, ...], rows: Tensor, columns: Tensor) -> Tensor:
        return self.numbers[(*leading, columns - rows + self.shape[-2] - 1)]


def find_diagonals(bias: Tensor) -> RelativeBias | None:
    """Return a bias (..., q, k) by its diagonals; None if it is not equal along every one, or too small."""
    queries, keys = bias.shape[-2:]
    if queries * keys < SMALLER * (queries + keys) or not is_relative(bias):
        return None
    return RelativeBias(torch.cat([bias[..., 1:, 0].flip(-1), bias[..., 0, :]], -1), queries)


def is_relative(bias: Tensor) -> bool:
    """Return whether the entries of a bias (..., q, k) with several queries are equal along every diagonal."""
    is_alike = torch.equal(bias[..., 1, 1:], bias[..., 0, :-1])  # quick, and False for most that are not
    return is_alike and torch.equal(bias[..., 1:, 1:], bias[..., :-1, :-1])
