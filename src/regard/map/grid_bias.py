"""Biases of images that depend on how far a key is from the query, in rows and in columns: stored by these offsets.

The relative positions of Swin, BEiT, LeViT and others are a number for each head and offset, which an index spreads to all
pairs of pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.map.computed_bias import NumberedBias, drop_repeated_axes

SMALLER = 4  # times as many entries as numbers must a bias have
STEPS = 4  # largest number of rows and columns from one query to the next


@dataclass(frozen=True)
class Grid:
    """Keys that are the pixels of an image behind `first` other tokens, and queries that are every `step`-th of its pixels."""

    first: int
    rows: int
    columns: int
    step: int = 1

    @property
    def query_rows(self) -> int:
        """The rows of queries."""
        return -(-self.rows // self.step)

    @property
    def query_columns(self) -> int:
        """The columns of queries."""
        return -(-self.columns // self.step)

    @property
    def queries(self) -> int:
        """The number of queries."""
        return self.first + self.query_rows * self.query_columns

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.first + self.rows * self.columns

    @property
    def offsets(self) -> tuple[int, int]:
        """How many offsets there are in rows and in columns."""
        return self.step * (self.query_rows - 1) + self.rows, self.step * (self.query_columns - 1) + self.columns

    @property
    def count(self) -> int:
        """How many numbers a bias has: of the offsets, the rows of other tokens, and their columns."""
        rows, columns = self.offsets
        return rows * columns + self.first * (self.keys + self.queries - self.first)

    def find_places(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the place among the numbers of each pair of query and key, by index."""
        (height, width), first = self.offsets, self.first
        i, j = queries - first, keys - first
        y = j // self.columns + self.step * (self.query_rows - 1 - i // self.query_columns)
        x = j % self.columns + self.step * (self.query_columns - 1 - i % self.query_columns)
        places = y * width + x
        if not first:
            return places
        rows = height * width + queries * self.keys + keys
        columns = height * width + first * self.keys + i * first + keys
        return torch.where(queries < first, rows, torch.where(keys < first, columns, places))


class GridBias(NumberedBias):
    """A bias (..., q, k) of some queries and keys of a grid, whose entries are numbers of the offset from query to key.

    Its slices, rows, entries and heads are found by the offsets; any other function of torch takes it as an ordinary tensor.
    """

    numbers: Tensor  # (..., n), in the order of Grid.find_places
    grid: Grid
    queries: range
    keys: range

    @staticmethod
    def __new__(cls, numbers: Tensor, grid: Grid, queries: range | None = None, keys: range | None = None) -> "GridBias":
        """Build the bias of a grid, or of a span of its queries and of its keys."""
        queries, keys = range(grid.queries) if queries is None else queries, range(grid.keys) if keys is None else keys
        shape = *numbers.shape[:-1], len(queries), len(keys)
        found: GridBias = Tensor._make_wrapper_subclass(cls, shape, dtype=numbers.dtype, device=numbers.device)
        found.numbers, found.grid, found.queries, found.keys = numbers, grid, queries, keys
        return found

    def copy_with(self, numbers: Tensor) -> "GridBias":
        return GridBias(numbers, self.grid, self.queries, self.keys)

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        numbers = drop_repeated_axes(self.numbers)
        queries, keys = (torch.arange(one.start, one.stop, device=numbers.device) for one in (self.queries, self.keys))
        return numbers[..., self.grid.find_places(queries.unsqueeze(-1), keys)].expand(self.shape)

    def select_spans(self, leading: tuple[Any, ...], rows: slice, columns: slice) -> Tensor:
        return GridBias(self.numbers[leading], self.grid, self.queries[rows], self.keys[columns])

    def read_entries(self, leading: tuple[Any, ...], rows: Tensor, columns: Tensor) -> Tensor:
        return self.numbers[(*leading, self.grid.find_places(rows + self.queries.start, columns + self.keys.start))]


def find_grid(bias: Tensor) -> GridBias | None:
    """Return a bias (..., q, k) by the offsets of an image; None if it is not that of one, or too small."""
    for grid in list_grids(*bias.shape[-2:]):
        pixels = bias[..., grid.first :, grid.first :]
        if depends_on_offset(pixels, grid):
            image = split_pixels(pixels, grid)
            others = bias[..., : grid.first, :].flatten(-2), bias[..., grid.first :, : grid.first].flatten(-2)
            return GridBias(torch.cat([list_offsets(image, grid), *others], -1), grid)
    return None


def list_grids(queries: int, keys: int) -> Iterator[Grid]:
    """Yield the grids that these numbers of queries and keys may be of, and that are worth it."""
    for first in (0, 1):
        for columns in range(2, (keys - first) // 2 + 1):
            if (keys - first) % columns == 0:
                for step in range(1, STEPS + 1):
                    grid = Grid(first, (keys - first) // columns, columns, step)
                    if grid.queries == queries and grid.count * SMALLER <= queries * keys:
                        yield grid


def split_pixels(pixels: Tensor, grid: Grid) -> Tensor:
    """Return entries (..., q, k) of the pixels of a grid as (..., query rows, query columns, rows, columns)."""
    return pixels.reshape(*pixels.shape[:-2], grid.query_rows, grid.query_columns, grid.rows, grid.columns)


def depends_on_offset(pixels: Tensor, grid: Grid) -> bool:
    """Return whether entries (..., q, k) of pixels are alike where their offsets are."""
    image, step = split_pixels(pixels, grid), grid.step
    one = image[(0,) * (image.dim() - 4)]
    if not torch.equal(one[0, 1:, 0, step:], one[0, :-1, 0, :-step]):  # quick, and False for most that are not
        return False
    queries, keys = grid.query_columns, step * grid.columns  # of a row of queries
    if not torch.equal(pixels[..., queries:, keys:], pixels[..., :-queries, :-keys]):
        return False
    first_queries, first_keys = image[..., 0, :, :, :], image[..., 0, :].transpose(-3, -2)  # all rows have their numbers
    return all(torch.equal(x[..., 1:, :, step:], x[..., :-1, :, :-step]) for x in (first_queries, first_keys))


def list_offsets(image: Tensor, grid: Grid) -> Tensor:
    """Return the number of each offset, (..., offsets), of entries (..., query rows, query columns, rows, columns)."""
    y, i = find_pairs(grid.query_rows, grid.rows, grid.step)
    x, j = find_pairs(grid.query_columns, grid.columns, grid.step)
    found: Tensor = image[..., y.unsqueeze(-1), x, i.unsqueeze(-1), j].flatten(-2)
    return found


def find_pairs(queries: int, keys: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a query and a key of each offset along an axis, in order."""
    offsets = torch.arange(-step * (queries - 1), keys)
    query = (-offsets).clamp(min=0).add(step - 1) // step
    return query, offsets + step * query
