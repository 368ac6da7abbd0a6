"""Sums of the weights of small matrices, (b, h, q, k): of nearby keys, of marked keys, and by distance.

This is the plain form in torch, which is the definition. What of it many scores of heads need, `compiled_passes` computes
together with the statistics of an overview, without storing the weights.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.map.plane import multiply_exactly

SMALLEST_VARIANCE = 1e-12  # of the mean square: below it all weights are equal up to rounding
CACHED_WEIGHTS = 2**19  # taken at a time, while they are in the cache
MEANS = (  # scores of heads, as regard.observe.detectors define them, whose means over the queries one pass computes
    *("previous token", "itself", "first token", "sink", "local", "distance", "keys", "stripe", "entropy", "breadth"),
)


@dataclass(frozen=True, eq=False)
class DistanceSums:
    """The sums of weights by distance and how many pairs have each, (..., distances), and the sum of all squares, (...)."""

    sums: Tensor
    pairs: Tensor
    squares: Tensor


@dataclass(frozen=True, eq=False)
class SumRequest:
    """Which sums are wanted: `b` or `h` may be 1 where batch rows or heads share the numbers."""

    window: int  # how far nearby keys are away at most
    share: float  # of the keys, that are heavy hitters
    sink: float  # the weight on the first token above which it is a sink
    counted: Tensor  # bool (b, h, q), the queries whose weights are summed by distance and for each key
    visible: Tensor  # bool (b, h, q, k), the keys that queries may see
    real: Tensor  # bool (b, h, k), the keys that can be among the heavy hitters
    heavy: Tensor  # int64 (b, h), how many heavy hitters there are, as the share says
    first: Tensor  # int64 (b,), the first token, which is no stripe


@dataclass(eq=False)
class WeightSums:
    """Sums of weights, and the share of the heavy hitters: the keys with the largest sums of weights."""

    window: int
    share: float
    by_query: Tensor  # (2, b, h, q), `near` and `stripes`
    numbers: Tensor  # float64 (2 + 3 MEANS, b, h), `heavy`, `positional` and `means`
    is_stripe: Tensor  # bool (b, h, k), the heavy hitters other than the first key
    has_blind_query: bool = False  # whether a query sees nothing, so that its weights are 0

    @staticmethod
    def allocate(wanted: SumRequest, b: int, h: int, q: int, k: int) -> "WeightSums":
        """Allocate the sums of float32 weights (b, h, q, k), for a compiled pass to fill."""
        by_query = torch.empty(2, b, h, q, dtype=torch.float32, device="cpu")
        numbers = torch.empty(2 + 3 * len(MEANS), b, h, dtype=torch.float64, device="cpu")
        return WeightSums(wanted.window, wanted.share, by_query, numbers, torch.empty(b, h, k, dtype=torch.bool, device="cpu"))

    @property
    def near(self) -> Tensor:
        """The weight of each query on nearby keys, (b, h, q)."""
        return self.by_query[0]

    @property
    def stripes(self) -> Tensor:
        """The weight of each query on the stripes, (b, h, q)."""
        return self.by_query[1]

    @property
    def heavy(self) -> Tensor:
        """The share of the heavy hitters, (b, h)."""
        return self.numbers[0]

    @property
    def positional(self) -> Tensor:
        """The share of the variance of the weights that their distance explains, (b, h), as `explain_by_distance`."""
        return self.numbers[1]

    @property
    def means(self) -> Tensor:
        """The means of MEANS over the queries, how many these are, and by chance, (3, MEANS, b, h); 0 without chance."""
        return self.numbers[2:].view(3, len(MEANS), *self.numbers.shape[1:])


def sum_near(weights: Tensor, positions: Tensor, window: int) -> Tensor:
    """Return the weight of each query, (b, h, q), on the keys at most `window` from its position (b or 1, q)."""
    near = (positions.unsqueeze(-1) - torch.arange(weights.shape[3], device=weights.device)).abs() <= window
    near = near.unsqueeze(1).expand(len(weights), -1, -1, -1)
    return torch.cat([(weights[rows] * near[rows]).sum(-1) for rows in iterate_blocks(weights)])


def sum_marked(weights: Tensor, marked: Tensor) -> Tensor:
    """Return the weight of each query, (b, h, q), on the keys that are marked, bool (b, h, k)."""
    return multiply_exactly(weights, marked.to(weights.dtype).unsqueeze(-1)).squeeze(-1)


def sum_by_distance(weights: Tensor, visible: Tensor, counted: Tensor) -> DistanceSums:
    """Return sums by distance, of keys that are visible, (b or 1, h or 1, q, k), to queries that count, (b or 1, h or 1, q)."""
    q, k = weights.shape[2:]
    queries, keys = (torch.arange(size, device=weights.device) for size in (q, k))
    numbers = (keys - queries.unsqueeze(-1) + q - 1).flatten()
    seen = visible & counted.unsqueeze(-1)
    found = [
        (sum_by_number(shown, numbers), shown.square_().sum(-1))
        for rows in iterate_blocks(weights)
        for shown in [weights[rows].where(seen[rows] if len(seen) > 1 else seen, 0).flatten(2).double()]
    ]
    sums, squares = (torch.cat(parts) for parts in zip(*found, strict=True))
    return DistanceSums(sums, sum_by_number(seen.flatten(2).double(), numbers), squares)


def explain_by_distance(found: DistanceSums) -> Tensor:
    """Return the share of the variance of the weights that their distance explains; NaN where all weights are equal."""
    mean = found.sums.sum(-1) ** 2 / found.pairs.sum(-1)
    explained = (found.sums.square() / found.pairs.clamp(min=1)).sum(-1) - mean
    total = found.squares - mean
    return (explained / total).masked_fill(~(total > SMALLEST_VARIANCE * found.squares), math.nan)


def sum_by_number(x: Tensor, numbers: Tensor) -> Tensor:
    """Return the sums of x (n, h, m) by number, int (m,) with any from 0 to the largest: (n, h, numbers)."""
    return x.new_zeros(*x.shape[:2], int(numbers.max()) + 1).index_add_(2, numbers, x)


def mark_largest(values: Tensor, counts: Tensor) -> Tensor:
    """Return whether a value (b, h, k) is positive and among the `counts` (b, h) largest; of equal ones the first are."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return (torch.empty_like(order).scatter_(-1, order, places) < counts.unsqueeze(-1)) & (values > 0)


def iterate_blocks(weights: Tensor) -> Iterator[slice]:
    """Yield slices of batch rows, of as many weights as a block holds."""
    step = max(1, CACHED_WEIGHTS // max(weights[0].numel(), 1))
    return (slice(start, start + step) for start in range(0, len(weights), step))
