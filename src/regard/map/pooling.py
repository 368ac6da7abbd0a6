"""Pictures of a matrix: bins of rows and columns, each with the mean, the largest or the sum of its weights."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map.indexing import check_slice
from regard.map.plane import Plane, RowRun
from regard.mechanism.arguments import check_choice, check_count, check_instance

How = Literal["mean", "max", "sum"]


def bin_edges(start: int, stop: int, bins: int) -> Tensor:
    """Return the edges of bins, (bins + 1,): bin r holds start + floor(r n / bins) to start + floor((r + 1) n / bins)."""
    return start + torch.arange(bins + 1) * (stop - start) // max(bins, 1)


class BinnedWeights:
    """The sums and maxima of weights in bins of rows and columns, accumulated run by run during a traversal."""

    def __init__(self, plane: Plane, rows: Tensor, columns: Tensor) -> None:
        """Allocate empty bins; rows and columns are their edges in tokens."""
        device = plane.q.device
        size = len(rows) - 1, len(columns) - 1
        self.rows, self.columns = rows.to(device), columns.to(device)
        self.sum = torch.zeros(size, dtype=torch.float64, device=device)
        self.max = torch.zeros(size, dtype=plane.q.dtype, device=device)

    @classmethod
    def from_sums(cls, rows: Tensor, columns: Tensor, total: Tensor, largest: Tensor) -> "BinnedWeights":
        """Make a picture from known sums and maxima."""
        picture = cls.__new__(cls)
        picture.rows, picture.columns, picture.sum, picture.max = rows, columns, total, largest
        return picture

    def __getitem__(self, plane: int) -> "BinnedWeights":
        """Return one picture of those of several planes."""
        return BinnedWeights.from_sums(self.rows, self.columns, self.sum[plane], self.max[plane])

    def __setitem__(self, plane: int, one: "BinnedWeights") -> None:
        """Replace one picture of those of several planes."""
        self.sum[plane], self.max[plane] = one.sum, one.max

    def add_run(self, run: RowRun) -> None:
        """Add a run of a traversal."""
        self.add(torch.arange(run.start, run.stop, device=run.columns.device), run.columns, run.weights)

    def add(self, queries: Tensor, keys: Tensor, weights: Tensor) -> None:
        """Add those of some weights (n, m) that are within the picture, given their queries and keys by index."""
        (i, mine), (j, theirs) = assign_bins(queries, self.rows), assign_bins(keys, self.columns)
        if not len(i) or not len(j):
            return
        weights = weights if mine.all() and theirs.all() else weights[mine][:, theirs]
        across = weights.new_zeros(len(i), self.sum.shape[1])
        self.sum.index_add_(0, i, across.index_add(1, j, weights).double())
        top = across.scatter_reduce(1, j.expand(len(i), -1), weights, "amax")
        self.max.scatter_reduce_(0, i.unsqueeze(-1).expand_as(top), top, "amax")

    def select_columns(self, bins: slice) -> "BinnedWeights":
        """Return the picture of some of its bins of columns."""
        edges = self.columns[bins.start : bins.stop + 1]
        return BinnedWeights.from_sums(self.rows, edges, self.sum[:, bins], self.max[:, bins])

    def pool(self, how: How) -> Tensor:
        """Return the mean, maximum or sum of each bin; 0 for a bin without rows or columns."""
        if how == "max":
            return self.max
        if how == "sum":
            return self.sum.to(self.max.dtype)
        area = self.rows.diff().unsqueeze(-1) * self.columns.diff()
        return (self.sum / area.clamp(min=1)).to(self.max.dtype)


@dataclass(frozen=True, eq=False)
class EntryBlock:
    """Complete rows of a matrix, for the queries start to stop; keys that are not among `columns` have entry 0 in them."""

    start: int
    stop: int
    columns: Tensor


Block = EntryBlock | RowRun


@dataclass(frozen=True, eq=False)
class SignedPicture:
    """The sums of signed numbers in bins, and their extremes: a picture of the numbers, and one of the same times -1."""

    numbers: BinnedWeights
    negatives: BinnedWeights

    @classmethod
    def allocate(cls, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> "SignedPicture":
        """Allocate empty bins; rows and columns are their edges in tokens."""
        size = len(rows) - 1, len(columns) - 1
        totals = torch.zeros(2, *size, dtype=torch.float64, device=rows.device)
        largest = torch.zeros(2, *size, dtype=dtype, device=rows.device)
        return cls(*(BinnedWeights.from_sums(rows, columns, *both) for both in zip(totals, largest, strict=True)))

    def add_run(self, run: Block, numbers: Tensor) -> None:
        """Add the numbers (n, m) of a run."""
        queries = torch.arange(run.start, run.stop, device=run.columns.device)
        self.numbers.add(queries, run.columns, numbers)
        self.negatives.add(queries, run.columns, -numbers)

    def pool(self, how: How) -> Tensor:
        """Return the mean or the sum of each bin, or its number that is largest in size; 0 for a bin without any."""
        return choose_larger(self.numbers.max, -self.negatives.max) if how == "max" else self.numbers.pool(how)


def choose_larger(high: Tensor, low: Tensor) -> Tensor:
    """Return the larger in size of two numbers, elementwise, of which high is not below low."""
    return torch.where(-low > high, low, high)


def assign_bins(indices: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin of each index that is within one, and a bool mask of those indices."""
    inside = (indices >= edges[0]) & (indices < edges[-1])
    return torch.searchsorted(edges, indices[inside], right=True) - 1, inside


def check_picture_size(how: str, size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the numbers of bins of rows and of columns, or raise ConfigError if they or `how` are invalid."""
    check_choice("how", how, get_args(How))
    if isinstance(size, tuple | list) and len(size) != 2:
        raise ConfigError(f"size must be one number of bins, or two, of rows and of columns; got {len(size)} numbers.")
    rows, columns = size if isinstance(size, tuple | list) else (size, size)
    return check_count("the number of rows", rows), check_count("the number of columns", columns)


def resolve_span(span: slice, size: int, name: str) -> tuple[int, int]:
    """Return the start and stop of a slice of an axis, or raise ShapeError if it has a step."""
    check_slice(name, check_instance(name, span, slice))
    start, stop, step = span.indices(size)
    if step != 1:
        raise ShapeError(f"{name} must be a slice without a step, got a step of {step}.")
    return start, max(start, stop)
