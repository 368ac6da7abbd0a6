"""The matrices of a map, one for each batch row and head, traversed by the fastest pass that applies to them."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.map import compiled_passes, passes, pooling, small_maps, triton_passes
from regard.map.plane import BLOCK_NUMBERS, DenominatorCache, Denominators, Pair, Plane, WeightRows, count_block_numbers
from regard.map.pooling import BinnedWeights, How
from regard.map.weight_sums import SumRequest, WeightSums
from regard.mechanism.request import Request

PICTURE_BINS = 256  # most rows and columns of an overview's picture


@dataclass(eq=False)
class MapPlanes:
    """The matrices (q, k) of some batch rows and heads of a request, and the denominators that were computed for them."""

    request: Request
    rows: Sequence[int]  # batch rows of q
    heads: Sequence[int]  # heads of q
    denominators: DenominatorCache = field(default_factory=DenominatorCache)  # shared by all selections of a map

    def __iter__(self) -> Iterator[Plane]:
        """Iterate over the matrices, the heads of a batch row one after the other."""
        return (Plane(self.request, *pair) for pair in itertools.product(self.rows, self.heads))

    def __len__(self) -> int:
        """Return the number of matrices."""
        return len(self.rows) * len(self.heads)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (b, h, q, k) of all matrices together."""
        return len(self.rows), len(self.heads), self.request.q.shape[2], self.request.k.shape[2]

    @property
    def device(self) -> torch.device:
        """The device of q and k, and of every result."""
        return self.request.q.device

    @property
    def nbytes(self) -> int:
        """The bytes stored: q, k, bias, sinks, weight, and the denominators of the rows computed so far."""
        tensors = [getattr(self.request, name) for name in ("q", "k", "bias", "sinks", "weight")]
        given: int = sum(x.nbytes for x in tensors if x is not None)
        return given + self.denominators.nbytes

    @property
    def is_batch(self) -> bool:
        """Whether the matrices are small ones, which go through one pass together."""
        return small_maps.is_worth_batch(self.request, len(self))

    @property
    def is_gpu_batch(self) -> bool:
        """Whether the matrices are on a GPU, and several of them go through one operation together."""
        return small_maps.is_gpu_batch(self.request, len(self))

    @cached_property
    def pairs(self) -> list[list[Pair]]:
        """The batch row and head in q of each matrix, by its place among the rows and heads."""
        return [[(row, head) for head in self.heads] for row in self.rows]

    @cached_property
    def row_numbers(self) -> Tensor:
        """The batch rows in q, (b,)."""
        return torch.tensor(self.rows, dtype=torch.int64, device=self.device)

    @cached_property
    def head_numbers(self) -> Tensor:
        """The heads in q, (h,)."""
        return torch.tensor(self.heads, dtype=torch.int64, device=self.device)

    @property
    def pair_numbers(self) -> Tensor:
        """The batch row and head in q of each matrix, (b h, 2)."""
        return torch.cartesian_prod(self.row_numbers, self.head_numbers)

    def list_planes(self) -> list[Plane]:
        """List the matrices, or raise ShapeError if there are none."""
        if not (planes := list(self)):
            raise ShapeError(f"the map is (b, h, q, k) = {self.shape}, which holds no matrix: b and h must be at least 1.")
        return planes

    def apply(self, function: Callable[[Plane], Tensor]) -> Tensor:
        """Apply a function to each matrix, and stack the results on the axes (b, h, ...)."""
        return self.split_axis(torch.stack([function(plane) for plane in self.list_planes()]))

    def apply_with_denominators(self, function: Callable[[Plane, Denominators], Tensor]) -> Tensor:
        """Apply a function of a matrix and its denominators to each, and stack the results."""
        if missing := [plane for plane in self if (plane.b, plane.h) not in self.denominators]:
            self.gather_statistics(missing)
        return self.apply(lambda plane: function(plane, self.get_denominators(plane)))

    def apply_to_batch(self, function: Callable[[WeightRows], Tensor]) -> Tensor:
        """Apply a function of a batch of matrices to all of them, (b, h, ...)."""
        (found,) = small_maps.compute_rows(self.request, self.pair_numbers, function)
        return self.split_axis(found)

    def split_axis(self, found: Tensor) -> Tensor:
        """Split the axis of all matrices, the first, into the axes of batch rows and heads."""
        return found.view(*self.shape[:2], *found.shape[1:])

    def traverse(
        self, planes: Sequence[Plane], rows: Tensor, columns: Tensor, statistics: Mapping[str, passes.Statistic]
    ) -> tuple[passes.TraversalResult, BinnedWeights]:
        """Traverse planes by the fastest pass available, with a picture and at least the statistics given: (n, ...) each."""
        quick = triton_passes.gather_statistics(planes, rows, columns) if triton_passes.can_run_triton(planes[0]) else None
        found = traverse_planes(planes, rows, columns, statistics) if quick is None else passes.stack_results(quick, statistics)
        self.denominators.add([(plane.b, plane.h) for plane in planes], found[0].denominators)
        return found

    def gather_statistics(self, planes: Sequence[Plane], **statistics: passes.Statistic) -> passes.TraversalResult:
        """Traverse planes for statistics that are among those of an overview: (n, ...) each."""
        if self.is_batch and len(self) <= 2 * len(planes):  # a pass over a few of many prepares the numbers of all
            pairs = [(plane.b, plane.h) for plane in planes]
            found, below = small_maps.gather_statistics(self.request, torch.tensor(pairs, device=self.device), list(statistics))
            self.denominators.add(pairs, below)
            received = found.pop("received")
            return passes.TraversalResult(found, received, below)
        no_picture = pooling.bin_edges(0, self.shape[2], min(self.shape[2], PICTURE_BINS)), pooling.bin_edges(0, 0, 1)
        return self.traverse(planes, *no_picture, statistics)[0]

    def gather_all_statistics(self) -> dict[str, Tensor]:
        """Compute the statistics of an overview of all matrices by the names of its fields."""
        found = self.gather_statistics(self.list_planes(), **passes.ROWS)
        return {name: self.split_axis(x) for name, x in {**found.rows, "received": found.received}.items()}

    def gather_overview(self) -> dict[str, Tensor]:
        """Compute the overview of all matrices by the names of its fields; the picture of small ones is the matrix itself."""
        if self.is_batch:
            found, below = small_maps.gather_statistics(self.request, self.pair_numbers, list(passes.ROWS), has_picture=True)
            self.denominators.add_product(self.rows, self.heads, below)
            mean = largest = found.pop("weights")
        else:
            planes = self.list_planes()
            rows, columns = (pooling.bin_edges(0, length, min(length, PICTURE_BINS)) for length in self.shape[2:])
            quick = None
            if compiled_passes.can_run_compiled(planes[0]):
                quick = compiled_passes.gather_overview(planes, torch.get_num_threads(), rows, columns)
            if quick is None:
                result, picture = self.traverse(planes, rows, columns, passes.ROWS)
                mean, largest = picture.pool("mean"), picture.pool("max")
            else:
                result, mean, largest, wrong = quick
                for n in wrong:
                    result[n], picture = passes.gather_with_picture(planes[n], rows, columns, passes.ROWS)
                    mean[n], largest[n] = picture.pool("mean"), picture.pool("max")
                self.denominators.add_product(self.rows, self.heads, result.denominators)
            found = {**result.rows, "received": result.received}
        return {name: self.split_axis(x) for name, x in {**found, "mean": mean, "max": largest}.items()}

    def find_top(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the n largest weights of each row and their keys, (b, h, q, n)."""
        planes = self.list_planes()
        if n <= compiled_passes.MOST and compiled_passes.can_run_compiled(planes[0]):
            values, keys, wrong = compiled_passes.find_top(planes, torch.get_num_threads(), n)
            for place in wrong:
                values[place], keys[place] = passes.find_top(planes[place], n)
        else:
            values, keys = (torch.stack(both) for both in zip(*(passes.find_top(plane, n) for plane in planes), strict=True))
        return self.split_axis(values), self.split_axis(keys)

    def gather_batch_sums(self, wanted: SumRequest) -> tuple[dict[str, Tensor], WeightSums] | None:
        """Compute the statistics, by name, and sums of the weights of small matrices; None if no compiled pass applies."""
        gathered = small_maps.gather_sums(self.request, self.pair_numbers, wanted)
        if gathered is None:
            return None
        found, sums = gathered
        below = Denominators(*(found.pop(name).flatten(0, 1) for name in ("shift", "total")))
        self.denominators.add_product(self.rows, self.heads, below)
        return found, sums

    def get_denominators(self, plane: Plane) -> Denominators:
        """Return the denominators of the rows of a plane, computed once."""
        if (plane.b, plane.h) not in self.denominators:
            self.gather_statistics([plane])
        return self.denominators[plane.b, plane.h]

    def can_use_denominators(self, plane: Plane, rows: int) -> bool:
        """Return whether the denominators of a plane are cached, or worth a traversal for this number of rows."""
        return (plane.b, plane.h) in self.denominators or 2 * rows > plane.shape[0]

    def iterate_weights(self, plane: Plane, queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield weights (n, m) of queries and keys by index, a part of the queries at a time; keys are in increasing order.

        For a few rows it is cheapest to compute complete rows; for more than half of them the denominators are worth caching.
        """
        known = self.can_use_denominators(plane, len(queries))
        below = self.get_denominators(plane) if known else None
        step = max(1, count_block_numbers(self.device) // max(len(keys) if known else plane.shape[1], 1))
        for start in range(0, len(queries), step):
            part = queries[start : start + step]
            if below is None:
                rows = plane.compute_rows(part)
                weights = rows if len(keys) == plane.shape[1] else rows[:, keys]
            else:
                weights = below[part].weigh(plane.compute_masked_scores(part, keys))
            yield slice(start, start + step), weights

    def pool(self, rows: Tensor, columns: Tensor, how: How) -> Tensor:
        """Pool each matrix into bins, (b, h, rows, columns), given their edges in tokens: whole matrices in one traversal."""
        if not self.is_whole(rows, columns):
            return self.apply(lambda plane: self.draw_picture(plane, rows, columns).pool(how))
        planes, step = self.list_planes(), max(1, BLOCK_NUMBERS // (len(rows) * len(columns)))  # a block of bins at a time
        some = (planes[start : start + step] for start in range(0, len(planes), step))
        return self.split_axis(torch.cat([self.traverse(part, rows, columns, {})[1].pool(how) for part in some]))

    def is_whole(self, rows: Tensor, columns: Tensor) -> bool:
        """Return whether bins with these edges cover the matrices."""
        return all([int(edges[0]), int(edges[-1])] == [0, n] for edges, n in zip((rows, columns), self.shape[2:], strict=True))

    def draw_picture(self, plane: Plane, rows: Tensor, columns: Tensor) -> BinnedWeights:
        """Draw the picture of one matrix, given the edges of its bins in tokens."""
        ends = [(int(edges[0]), int(edges[-1])) for edges in (rows, columns)]
        if self.is_whole(rows, columns):
            return self.traverse([plane], rows, columns, {})[1][0]
        count = ends[0][1] - ends[0][0]
        if count and compiled_passes.can_run_compiled(plane) and self.can_use_denominators(plane, count):
            quick = compiled_passes.draw_picture(plane, torch.get_num_threads(), self.get_denominators(plane), rows, columns)
            if quick is not None:
                return quick
        picture = BinnedWeights(plane, rows, columns)
        queries, keys = (torch.arange(*span, device=self.device) for span in ends)
        for part, weights in self.iterate_weights(plane, queries, keys):
            picture.add(queries[part], keys, weights)
        return picture


def traverse_planes(
    planes: Sequence[Plane], rows: Tensor, columns: Tensor, statistics: Mapping[str, passes.Statistic]
) -> tuple[passes.TraversalResult, BinnedWeights]:
    """Traverse planes by the compiled pass, and by the plain one if that does not apply, or those with a NaN."""
    if not compiled_passes.can_run_compiled(planes[0]):
        return passes.stack_results(
            (passes.gather_with_picture(plane, rows, columns, statistics) for plane in planes), statistics
        )
    result, picture, wrong = compiled_passes.gather_statistics(planes, torch.get_num_threads(), rows, columns, statistics)
    for n in wrong:
        result[n], picture[n] = passes.gather_with_picture(planes[n], rows, columns, statistics)
    return result, picture


def traverse_plane(
    plane: Plane, rows: Tensor, columns: Tensor, statistics: Mapping[str, passes.Statistic]
) -> tuple[passes.TraversalResult, BinnedWeights]:
    """Traverse one plane, as `traverse_planes` several."""
    result, picture = traverse_planes([plane], rows, columns, statistics)
    return result[0], picture[0]
