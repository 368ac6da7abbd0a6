"""Biases that depend on the distance from query to key alone, as T5's: stored by their diagonals, a vector for each head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.map.computed_bias import ENTRYWISE, ComputedBias, MatrixIndex

SMALLER = 4  # times as many entries as its diagonals must a bias have


class RelativeBias(ComputedBias):
    """A bias (..., q, k) of which only the diagonals (..., q + k - 1) are stored.

    The entry of query i and key j is diagonals[j - i + q - 1]. Its slices, rows, entries and heads are found by the diagonals;
    any other function of torch takes it as an ordinary tensor.
    """

    diagonals: Tensor

    @staticmethod
    def __new__(cls, diagonals: Tensor, queries: int) -> "RelativeBias":
        """Build the bias of `queries` queries."""
        shape = *diagonals.shape[:-1], queries, diagonals.shape[-1] - queries + 1
        found: RelativeBias = Tensor._make_wrapper_subclass(cls, shape, dtype=diagonals.dtype, device=diagonals.device)
        found.diagonals = diagonals
        return found

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the diagonals."""
        return self.diagonals.nbytes

    def data_ptr(self) -> int:
        """Return the address of the diagonals."""
        return self.diagonals.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the diagonals."""
        return self.diagonals.untyped_storage()

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        """Return the whole bias."""
        return self.diagonals.unfold(-1, self.shape[-1], 1).flip(-2)

    def expand(self, *sizes: Any, **_: Any) -> "RelativeBias":
        """Return the bias expanded along axes before those of queries and keys."""
        shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        return RelativeBias(self.diagonals.expand(*shape[:-2], -1), self.shape[-2])

    def read(self, index: MatrixIndex) -> Tensor | None:
        """Return the entries of an index; None if they do not follow from the diagonals alone."""
        queries, keys = self.shape[-2:]
        spans = index.find_spans(queries, keys)
        if spans is not None:
            rows, columns = spans
            distances = slice(columns.start - rows.stop + queries, columns.stop - rows.start + queries - 1)
            return RelativeBias(self.diagonals[(*index.leading, distances)], rows.stop - rows.start)
        entries = index.find_entries(queries, keys)
        return None if entries is None else self.diagonals[(*index.leading, entries[1] - entries[0] + queries - 1)]


def apply_to_diagonals(name: str) -> Callable[..., RelativeBias]:
    """Return the method of a tensor that treats its entries one by one, for a relative bias."""

    def compute(self: RelativeBias, *args: Any, **kwargs: Any) -> RelativeBias:
        return RelativeBias(getattr(self.diagonals, name)(*args, **kwargs), self.shape[-2])

    return compute


for name in ENTRYWISE:
    setattr(RelativeBias, name, apply_to_diagonals(name))


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
