"""What maps of signed numbers have in common: sums, pictures and products of a matrix that is computed block by block."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.html_repr import HtmlRepr
from regard.map import indexing, pooling
from regard.map.attention_map import LIMIT_BYTES, check_result_size
from regard.map.attribution_passes import EntryStatistics, gather_blocks
from regard.map.map_planes import PICTURE_BINS
from regard.map.pooling import Block, bin_edges
from regard.mechanism.arguments import check_count, describe_value


@dataclass(frozen=True, eq=False)
class SignedOverview:
    """Statistics of a map of signed numbers from one traversal.

    row_sums (b, h, q) and column_sums (b, h, k); largest (b, h, q), the entry of each row that is largest in size, with its
    sign; mean (b, h, rows, columns), a picture of signed means, and max, of the entries that are largest in size.
    """

    row_sums: Tensor
    column_sums: Tensor
    largest: Tensor
    mean: Tensor
    max: Tensor


class SharedAxes:
    """What a map has in common with the map of weights that it is computed from."""

    weights: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (b, h, q, k)."""
        shape: tuple[int, int, int, int] = self.weights.shape
        return shape

    @property
    def device(self) -> torch.device:
        """The device of every result."""
        device: torch.device = self.weights.device
        return device


class SignedMap(HtmlRepr, ABC):
    """A matrix of signed numbers for each batch row and head, (b, h, q, k), whose rows are computed when they are requested."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (b, h, q, k)."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of every result."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of every result, float32 or float64."""

    @abstractmethod
    def iterate_plane(self, b: int, h: int) -> Iterator[tuple[Block, Tensor]]:
        """Yield the blocks of complete rows of one matrix, in order, and the entries (n, m) of each."""

    @abstractmethod
    def __getitem__(self, index: Any) -> Tensor:
        """Return entries by ints, slices, lists and tensors, in the shape that torch would give."""

    def iterate_blocks(self) -> Iterator[tuple[int, int, Block, Tensor]]:
        """Yield batch row, head, the block of queries and keys, and the entries (n, m) of it."""
        for b in range(self.shape[0]):
            for h in range(self.shape[1]):
                for block, entries in self.iterate_plane(b, h):
                    yield b, h, block, entries

    def row_sums(self) -> Tensor:
        """Compute the sum of each row, (b, h, q)."""
        return self.overview(1).row_sums

    def column_sums(self) -> Tensor:
        """Compute the sum of each column, (b, h, k)."""
        return self.overview(1).column_sums

    def overview(self, bins: int = PICTURE_BINS) -> SignedOverview:
        """Compute all statistics and pictures of at most `bins` bins along each axis, in one traversal."""
        most = check_count("bins", bins)
        found = self.gather_entries(*(bin_edges(0, size, min(size, most)) for size in self.shape[2:]))
        sums = ([getattr(one, name) for one in found] for name in ("row_sums", "column_sums", "largest"))
        pictures = ([one.picture.pool(how) for one in found] for how in ("mean", "max"))
        return SignedOverview(*map(self.stack_planes, (*sums, *pictures)))

    def pooled(self, rows: int, columns: int, how: pooling.How = "mean") -> Tensor:
        """Pool the matrix into bins, (b, h, rows, columns): the signed mean or sum, or the entry that is largest in size."""
        return self.tile(slice(None), slice(None), (rows, columns), how)

    def tile(self, rows: slice, columns: slice, size: int | tuple[int, int], how: pooling.How = "mean") -> Tensor:
        """Pool a part of the matrix into bins, (b, h, rows, columns): the signed mean or sum, or the entry largest in size.

        rows and columns are slices of queries and keys; size is the number of bins, an int for both axes or a pair.
        """
        size = pooling.check_picture_size(how, size)
        q, k = self.shape[2:]
        parts = pooling.resolve_span(rows, q, "rows"), pooling.resolve_span(columns, k, "columns")
        self.check_size(self.shape[0] * self.shape[1] * size[0] * size[1], "fewer rows and columns")
        found = self.gather_entries(*(bin_edges(*span, bins) for span, bins in zip(parts, size, strict=True)))
        return self.stack_planes([one.picture.pool(how) for one in found])

    def gather_entries(self, rows: Tensor, columns: Tensor) -> list[EntryStatistics]:
        """Traverse each matrix, given the edges of the picture's bins."""
        edges = [x.to(self.device) for x in (rows, columns)]
        planes = [self.iterate_plane(b, h) for b in range(self.shape[0]) for h in range(self.shape[1])]
        return [gather_blocks(blocks, self.shape[2:], self.dtype, *edges) for blocks in planes]

    def mass(self, keys: slice | Tensor) -> Tensor:
        """Compute the sum of each row's entries on a set of keys, a slice or a bool (k,): (b, h, q)."""
        seen = indexing.mark_keys(keys, self.shape[3], self.device).to(self.dtype)
        return (self @ seen.view(1, 1, -1, 1).expand(self.shape[0], -1, -1, -1)).squeeze(-1)

    def top(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the n entries of each row that are largest in size, with their signs, and their keys, both (b, h, q, n)."""
        b, h, q, k = self.shape
        indexing.check_key_count(n, k)
        self.check_size(3 * b * h * q * n, "a smaller n or m.select(heads=...)")
        values = torch.zeros(b, h, q, n, dtype=self.dtype, device=self.device)
        keys = torch.arange(n, device=self.device).repeat(b, h, q, 1)
        for row, head, block, entries in self.iterate_blocks():
            count, part = min(n, entries.shape[1]), slice(block.start, block.stop)
            places = entries.abs().topk(count, -1).indices
            values[row, head, part, :count] = entries.gather(-1, places).to(self.dtype)
            keys[row, head, part, :count] = block.columns[places]
            if count < n:
                others = torch.ones(k, dtype=torch.bool, device=self.device).index_fill(0, block.columns, False)
                keys[row, head, part, count:] = others.nonzero().flatten()[: n - count]
        return values, keys

    @property
    def mT(self) -> "TransposedSignedMap":
        """The transpose, for a product: m.mT @ r."""
        return TransposedSignedMap(self)

    def __matmul__(self, x: Tensor) -> Tensor:
        """Compute the product with x (b, 1 or h, k, n), (b, h, q, n), block by block."""
        x = self.check_factor("x", x, self.shape[3])
        found = x.new_zeros(*self.shape[:3], x.shape[3])
        for n, m, block, entries in self.iterate_blocks():
            found[n, m, block.start : block.stop] = (entries @ x[n, m, block.columns].to(entries.dtype)).to(self.dtype)
        return found

    def multiply_transpose(self, r: Tensor) -> Tensor:
        """Compute the product of the transpose with r (b, h, q, n), (b, h, k, n), block by block."""
        found = torch.zeros(*self.shape[:2], self.shape[3], r.shape[3], dtype=torch.float64, device=self.device)
        for n, m, block, entries in self.iterate_blocks():
            part = entries.mT @ r[n, m, block.start : block.stop].to(entries.dtype)
            found[n, m].index_add_(0, block.columns, part.double())
        return found.to(self.dtype)

    def check_factor(self, name: str, x: Tensor, length: int) -> Tensor:
        """Return the factor of a product, expanded to (b, h, length, n), in the map's dtype. Raises ShapeError."""
        b, h, *_ = self.shape
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[0] != b or x.shape[1] not in (1, h) or x.shape[2] != length:
            raise ShapeError(f"{name} must be ({b}, 1 or {h}, {length}, n), got {describe_value(x)}.")
        return x.to(self.dtype).expand(b, h, length, -1)

    def dense(self, limit_bytes: int = LIMIT_BYTES) -> Tensor:
        """Return the matrix itself, (b, h, q, k).

        Raises TooLargeError, stating the bytes, if it is larger than `limit_bytes`, which can be raised.
        """
        b, h, q, k = self.shape
        self.check_size(b * h * q * k, "m[...], m.pooled(rows, columns) or m.top(n), or dense(limit_bytes=...)", limit_bytes)
        found = torch.zeros(b, h, q, k, dtype=self.dtype, device=self.device)
        for row, head, block, entries in self.iterate_blocks():
            found[row, head, block.start : block.stop].index_copy_(1, block.columns, entries.to(self.dtype))
        return found

    def check_size(self, numbers: int, instead: str, limit_bytes: float = LIMIT_BYTES) -> None:
        """Raise TooLargeError if a result of this many numbers is beyond the limit; `instead` is what to use."""
        check_result_size(numbers * self.dtype.itemsize, instead, limit_bytes)

    def stack_planes(self, found: list[Tensor]) -> Tensor:
        """Stack the results of all matrices on the axes (b, h, ...). Raises ShapeError if there are none."""
        if not found:
            raise ShapeError(f"the map is (b, h, q, k) = {self.shape}, which holds no matrix: b and h must be at least 1.")
        return torch.stack(found).view(*self.shape[:2], *found[0].shape)


@dataclass(frozen=True, eq=False)
class TransposedSignedMap:
    """The transpose of a map, (b, h, k, q)."""

    of: SignedMap

    def __matmul__(self, r: Tensor) -> Tensor:
        """Compute the product of the transpose with r (b, 1 or h, q, n), (b, h, k, n), without storing a matrix."""
        return self.of.multiply_transpose(self.of.check_factor("r", r, self.of.shape[2]))
