"""AttentionMap: the attention matrix as a value that is never stored, and the statistics, pictures and products of it."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError, TooLargeError
from regard.html_repr import HtmlRepr
from regard.map import additive, compiled_passes, indexing, passes, pooling, small_maps, triton_passes, weight_products
from regard.map.plane import DenominatorCache, Denominators, Pair, Plane, count_block_numbers
from regard.map.pooling import BinnedWeights, How
from regard.map.weight_sums import SumRequest, WeightSums
from regard.mechanism import heads
from regard.mechanism.arguments import (
    LARGEST_POSITION,
    check_count,
    check_floating,
    check_integer,
    check_number,
    describe_value,
)
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.request import disable_autocast, make_request
from regard.mechanism.scores import score_dtype

LIMIT_BYTES = 2**30  # of a returned tensor
PICTURE_BINS = 256  # most rows and columns of an overview's picture
CERTIFIED_ROWS = 64  # rows of each matrix that a certificate checks by default
DOT_PRODUCT_COST = 8  # a dot product on its own takes about 8 times as long as one within a matrix product
Index = int | slice | Sequence[int] | Tensor
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class Statistics:
    """All row and column statistics of a map, from one traversal; the row statistics are (b, h, q)."""

    logsumexp: Tensor
    entropy: Tensor
    largest: Tensor
    distance: Tensor
    first: Tensor
    itself: Tensor
    previous: Tensor
    received: Tensor  # (b, h, k)


@dataclass(frozen=True, eq=False)
class Overview(Statistics):
    """All row and column statistics of a map and its picture, from one traversal; the row statistics are (b, h, q)."""

    mean: Tensor  # (b, h, rows, columns)
    max: Tensor


@dataclass(frozen=True)
class Certificate:
    """How exact a map is: the largest distance of a row's sum from 1, how many rows were checked, and whether that was all."""

    error: float
    rows: int
    exact: bool


class AttentionMap(HtmlRepr):
    """softmax(q kᵀ / √d) under a mask, (b, h, q, k), of which only q, k and the mask are stored.

    Arguments are those of attend, without v. With a `weight` (d,) the scores are additive, as Bahdanau's: weightᵀ tanh(q + k)
    of queries and keys already projected, with scale 1 by default. Weights are computed when they are requested, before
    dropout, in float32 at least; those of a query that may see nothing are 0. Every method but dense works in blocks of 16 MiB,
    on a GPU of some hundred, and raises TooLargeError, stating the bytes, if the result itself would be larger than a gigabyte.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        mask: Mask = EVERYTHING,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        offset: Offset = 0,
        weight: Tensor | None = None,
    ) -> None:
        if weight is None:
            request = make_request(q, k, k, mask, scale, softcap, bias, sinks, offset)
        else:
            with disable_autocast(q.device):  # additive attention is not rounded
                request = make_request(q, k, k, mask, 1.0 if scale is None else scale, softcap, bias, sinks, offset)
            request = request._replace(weight=additive.check_weight(weight, request.q).detach())
        if request.q.device.type == "meta":
            raise ConfigError("q and k must have data, but tensors on the meta device have none. Use another device.")
        bias, sinks = (None if x is None else x.detach() for x in (request.bias, request.sinks))
        self._request = request._replace(
            q=request.q.detach(), k=request.k.detach(), v=request.k.detach(), bias=bias, sinks=sinks
        )
        batch, heads = self._request.q.shape[:2]
        self._rows: Sequence[int] = range(batch)  # of q, and which of its heads
        self._columns: Sequence[int] = range(heads)
        self._denominators = DenominatorCache()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (b, h, q, k)."""
        q, k = self._request.q.shape[2], self._request.k.shape[2]
        return len(self._rows), len(self._columns), q, k

    @property
    def device(self) -> torch.device:
        """The device of q and k, and of every result."""
        return self._request.q.device

    @property
    def nbytes(self) -> int:
        """The bytes stored: q, k, bias, sinks, weight, and the denominators of the rows computed so far."""
        tensors = [getattr(self._request, name) for name in ("q", "k", "bias", "sinks", "weight")]
        given: int = sum(x.nbytes for x in tensors if x is not None)
        return given + self._denominators.nbytes

    @property
    def mT(self) -> "Transposed":
        """The transpose, for a product: m.mT @ r."""
        return Transposed(self)

    def select(self, batch: Index = slice(None), heads: Index = slice(None)) -> "AttentionMap":
        """Return a smaller map of some batch rows and heads, still of four axes, sharing memory."""
        b, h, *_ = self.shape
        smaller = object.__new__(AttentionMap)
        smaller._request, smaller._denominators = self._request, self._denominators
        smaller._rows = [self._rows[i] for i in indexing.select_places("batch", batch, b).tolist()]
        smaller._columns = [self._columns[j] for j in indexing.select_places("heads", heads, h).tolist()]
        return smaller

    def __len__(self) -> int:
        """Return the number of batch rows, as of a tensor."""
        return len(self._rows)

    def __bool__(self) -> bool:
        """Return True: a map is not an empty container."""
        return True

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the weights (h, q, k) of each batch row, as of a tensor."""
        return (self[row] for row in range(len(self)))

    def __getitem__(self, index: Any) -> Tensor:
        """Return weights by ints, slices, lists and tensors, in the shape that torch would give."""
        index = indexing.expand_index(index)
        self._check_size(indexing.count_entries(self.shape, index), "m.pooled(rows, columns) or m.top(n)")
        if isinstance(index[3], slice):
            b, h, i = indexing.coordinates(self.shape[:3], index[:3])
            keys = torch.arange(self.shape[3])[index[3]]
            return self._gather_rows(b, h, i, keys.to(self.device)).view(*b.shape, len(keys))
        b, h, i, j = indexing.coordinates(self.shape, index)
        return self._gather_entries(b, h, i, j).view(b.shape)

    def logsumexp(self) -> Tensor:
        """Compute log Σ exp of each row's scores and sink, nats, (b, h, q); -inf for a row that sees nothing."""
        if self._is_batch:
            return self._apply_to_batch(small_maps.logsumexp)
        return self._apply_with_denominators(lambda _, below: below.logsumexp)

    def entropy(self) -> Tensor:
        """Compute -Σ w log w of each row, nats, (b, h, q); 0 for a row that sees nothing."""
        if self._is_batch:
            return self._apply_to_batch(small_maps.entropy)
        return self._stack_planes([found.rows["entropy"] for found in self._gather_statistics(entropy=passes.entropy)])

    def received(self) -> Tensor:
        """Compute the sum of each column, (b, h, k)."""
        if self._is_batch:
            return self._apply_to_batch(small_maps.sum_columns)
        return self._stack_planes([found.received for found in self._gather_statistics()])

    def mass(self, keys: slice | Tensor) -> Tensor:
        """Compute the weight of each row on a set of keys, a slice or a bool (k,): (b, h, q)."""
        seen = torch.zeros(self.shape[3], dtype=torch.bool, device=self.device)
        if isinstance(keys, Tensor) and (keys.dtype != torch.bool or keys.shape != seen.shape):
            raise ShapeError(f"keys must be a slice or a bool tensor ({self.shape[3]},), got {keys.dtype} {tuple(keys.shape)}.")
        seen[indexing.select_places("keys", keys, len(seen)).to(self.device)] = True
        keys_seen = seen.nonzero().squeeze(-1)
        if self._is_batch:
            return self._apply_to_batch(lambda batch: batch.weights[..., keys_seen].sum(-1))
        if 2 * len(keys_seen) > len(seen):
            indicator = seen.to(score_dtype(self._request.q.dtype)).view(1, 1, -1, 1)
            return self._multiply(
                weight_products.ApplyWeights, "keys", indicator.expand(self.shape[0], -1, -1, -1), len(seen)
            ).squeeze(-1)
        return self._apply_with_denominators(lambda plane, below: passes.mass(plane, below, keys_seen))

    def diagonal(self, back: int = 0) -> Tensor:
        """Return the weight of each query on the key at its own position minus `back`, (b, h, q); 0 if there is no such key."""
        if abs(check_integer("back", back)) > LARGEST_POSITION:
            raise ConfigError("back counts keys before a query's position and must be between -2**61 and 2**61.")
        if self._is_batch:
            return self._apply_to_batch(small_maps.make_diagonal(int(back)))
        return self._apply_with_denominators(lambda plane, below: passes.diagonal(plane, below, int(back)))

    def top(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the n largest weights of each row and their keys, largest first, both (b, h, q, n)."""
        b, h, q, k = self.shape
        if not 1 <= check_integer("n", n) <= k:
            raise ConfigError(f"n must be at least 1 and at most the number of keys, {k}; got {describe_value(n)}.")
        keys = 64 // torch.finfo(score_dtype(self._request.q.dtype)).bits  # of int64, in numbers of the weights
        self._check_size((1 + keys) * b * h * q * n, "a smaller n or m.select(heads=...)")
        if self._is_batch or self._is_gpu_batch:
            batches = small_maps.iterate_batches(self._request, self._pair_numbers)
            both = zip(*(batch.weights.topk(n) for batch in batches), strict=True)
            values, indices = (torch.cat(parts).view(b, h, q, n) for parts in both)
            return values, indices
        planes = list(self._iterate_planes())
        quick = (
            self._run_compiled(planes, lambda plane, threads: compiled_passes.find_top(plane, threads, n))
            if n <= compiled_passes.MOST
            else [None] * len(planes)
        )
        found = [passes.find_top(plane, n) if one is None else one for plane, one in zip(planes, quick, strict=True)]
        return self._stack_planes([values for values, _ in found]), self._stack_planes([keys for _, keys in found])

    def pooled(self, rows: int, columns: int, how: How = "mean") -> Tensor:
        """Pool the matrix into bins of rows and columns, (b, h, rows, columns): the mean, max or sum of the weights in each.

        Bin r holds the rows floor(r q / rows) to floor((r + 1) q / rows). Weights that are not visible count as 0.
        """
        return self.tile(slice(None), slice(None), (rows, columns), how)

    def tile(self, rows: slice, columns: slice, size: int | tuple[int, int], how: How = "mean") -> Tensor:
        """Pool a part of the matrix into bins, (b, h, rows, columns): the mean, max or sum of the weights in each.

        rows and columns are slices of queries and keys; size is the number of bins, an int for both axes or a pair.
        """
        size = pooling.check_picture_size(how, size)
        b, h, q, k = self.shape
        parts = pooling.resolve_span(rows, q, "rows"), pooling.resolve_span(columns, k, "columns")
        self._check_size(b * h * size[0] * size[1], "fewer rows and columns")
        bins = [pooling.bin_edges(*span, count) for span, count in zip(parts, size, strict=True)]
        return self._apply_to_planes(lambda plane: self._draw_picture(plane, *bins).pool(how))

    def overview(self) -> Overview:
        """Compute all row and column statistics and a picture of at most 256 x 256 bins, in one traversal."""
        q, k = self.shape[2:]
        if self._is_batch:
            return self._gather_batch_overview()
        rows, columns = (pooling.bin_edges(0, length, min(length, PICTURE_BINS)) for length in (q, k))
        found = [
            {**gathered.rows, "received": gathered.received, "mean": picture.pool("mean"), "max": picture.pool("max")}
            for gathered, picture in self._traverse(list(self._iterate_planes()), rows, columns, passes.ROWS)
        ]
        names = [*passes.ROWS, "received", "mean", "max"]
        return Overview(**{name: self._stack_planes([one[name] for one in found]) for name in names})

    def __matmul__(self, v: Tensor) -> Tensor:
        """Compute A v, exact and block by block, in v's dtype: v (b, g or h, k, e) to (b, h, q, e); differentiable in v."""
        return self._multiply(weight_products.ApplyWeights, "v", v, self.shape[3])

    def dense(self, limit_bytes: int = LIMIT_BYTES) -> Tensor:
        """Return the matrix itself, (b, h, q, k).

        Raises TooLargeError, stating the bytes, if it is larger than `limit_bytes`, which can be raised.
        """
        b, h, q, k = self.shape
        if not check_number("limit_bytes", limit_bytes) >= 0:
            raise ConfigError(f"limit_bytes must be a number of bytes, at least 0; got {limit_bytes}.")
        self._check_size(b * h * q * k, "m[...], m.pooled(rows, columns) or m.top(n), or dense(limit_bytes=...)", limit_bytes)
        if self._is_batch or self._is_gpu_batch:
            return small_maps.compute_weights(self._request, self._pair_numbers).view(b, h, q, k)
        return self._apply_to_planes(passes.compute_dense)

    def certificate(self, rows: int = CERTIFIED_ROWS) -> Certificate:
        """Compute how exact this map is, from recomputed rows of each matrix.

        The sum of a row and its sink must be 1, or 0 for a row that sees nothing.
        """
        rows, q = check_count("rows", rows), self.shape[2]
        queries = (torch.arange(min(rows, q)) * q // max(min(rows, q), 1)).to(self.device)
        errors = [passes.largest_row_error(plane, self._get_denominators(plane), queries) for plane in self._iterate_planes()]
        return Certificate(max(errors, default=0.0), len(errors) * len(queries), len(queries) == q)

    def __repr__(self) -> str:
        stored = f"{self.nbytes / 1e6:.3g} MB stored"
        additive = "" if self._request.weight is None else ", additive"
        return f"AttentionMap{self.shape}, {self._request.mask}{additive}, {stored}"

    def _iterate_planes(self) -> Iterator[Plane]:
        return (Plane(self._request, *pair) for pair in self._list_pairs())

    def _list_pairs(self) -> list[tuple[int, int]]:
        """List the batch row and head of each matrix of this map."""
        return list(itertools.product(self._rows, self._columns))

    @cached_property
    def _pairs(self) -> list[list[tuple[int, int]]]:
        """The batch row and head of each matrix in q, by batch row and head of this map."""
        return [[(row, column) for column in self._columns] for row in self._rows]

    @cached_property
    def _row_numbers(self) -> Tensor:
        """The batch rows of q that this map is of, (b,)."""
        return torch.tensor(self._rows, dtype=torch.int64, device=self.device)

    @cached_property
    def _column_numbers(self) -> Tensor:
        """The heads of q that this map is of, (h,)."""
        return torch.tensor(self._columns, dtype=torch.int64, device=self.device)

    @property
    def _pair_numbers(self) -> Tensor:
        """The batch row and head of each matrix in q, (b h, 2)."""
        return torch.cartesian_prod(self._row_numbers, self._column_numbers)

    def _index_pairs(self, pairs: Sequence[Pair]) -> Tensor:
        """Convert batch rows and heads to indices (n, 2)."""
        return torch.tensor(pairs, device=self.device)

    @property
    def _is_batch(self) -> bool:
        """Whether the matrices are many small ones, which go through one pass together."""
        return small_maps.is_worth_batch(self._request, len(self._rows) * len(self._columns))

    @property
    def _is_gpu_batch(self) -> bool:
        """Whether the matrices are on a GPU, and several of them go through one operation together."""
        return small_maps.is_gpu_batch(self._request, len(self._rows) * len(self._columns))

    def _apply_to_batch(self, function: Callable[[small_maps.PlaneBatch], Tensor]) -> Tensor:
        """Apply a function of a batch of matrices to all of them, (b, h, ...)."""
        (found,) = small_maps.compute_rows(self._request, self._pair_numbers, function)
        return found.view(*self.shape[:2], *found.shape[1:])

    def _gather_batch_overview(self) -> Overview:
        """Compute the overview of many small matrices, whose picture is the matrix itself."""
        found, below = small_maps.gather_statistics(self._request, self._pair_numbers, list(passes.ROWS), has_picture=True)
        self._denominators.add_product(self._rows, self._columns, below)
        weights = found.pop("weights")
        shaped = {name: x.view(*self.shape[:2], *x.shape[1:]) for name, x in {**found, "mean": weights, "max": weights}.items()}
        return Overview(**shaped)

    def _gather_batch_sums(self, wanted: SumRequest) -> tuple[Statistics, WeightSums] | None:
        """Compute the statistics and sums of the weights of many small matrices; None if no compiled pass applies."""
        gathered = small_maps.gather_sums(self._request, self._pair_numbers, wanted)
        if gathered is None:
            return None
        found, sums = gathered
        below = Denominators(found.pop("shift"), found.pop("total"))
        self._denominators.add_product(self._rows, self._columns, below)
        return Statistics(**{name: x.view(*self.shape[:2], -1) for name, x in found.items()}), sums

    def _list_planes(self) -> list[Plane]:
        """List the matrices of this map, or raise ShapeError if there are none."""
        if not (planes := list(self._iterate_planes())):
            raise ShapeError(f"the map is (b, h, q, k) = {self.shape}, which holds no matrix: b and h must be at least 1.")
        return planes

    def _apply_to_planes(self, function: Callable[[Plane], Tensor]) -> Tensor:
        return self._stack_planes([function(plane) for plane in self._iterate_planes()])

    def _stack_planes(self, found: list[Tensor]) -> Tensor:
        """Stack the results of all planes on the axes (b, h, ...)."""
        self._list_planes()
        return torch.stack(found).view(*self.shape[:2], *found[0].shape)

    def _traverse(
        self, planes: Sequence[Plane], rows: Tensor, columns: Tensor, statistics: Mapping[str, passes.Statistic]
    ) -> list[tuple[passes.TraversalResult, BinnedWeights]]:
        """Traverse each plane by the fastest pass available, with a picture and at least the statistics given."""
        found = []
        quick: Sequence[tuple[passes.TraversalResult, BinnedWeights] | None] | None = None
        if planes and triton_passes.can_run_triton(planes[0]):
            quick = triton_passes.gather_statistics(planes, rows, columns)
        if quick is None:
            quick = self._run_compiled(
                planes, lambda plane, threads: compiled_passes.gather_statistics(plane, threads, rows, columns)
            )
        for plane, one in zip(planes, quick, strict=True):
            gathered, picture = one or passes.gather_with_picture(plane, rows, columns, statistics)
            self._denominators.add([(plane.b, plane.h)], gathered.denominators[None])
            found.append((gathered, picture))
        return found

    def _run_compiled(self, planes: Sequence[Plane], work: Callable[[Plane, int], Answer | None]) -> Sequence[Answer | None]:
        """Run a compiled pass on each plane; None for each plane that has to go through the plain pass."""
        return (
            compiled_passes.run_planes(planes, work)
            if planes and compiled_passes.can_run_compiled(planes[0])
            else [None] * len(planes)
        )

    def _gather_statistics(
        self, planes: Sequence[Plane] | None = None, **statistics: passes.Statistic
    ) -> list[passes.TraversalResult]:
        """Traverse every plane, or the planes given, for statistics that are among those of an overview."""
        # an empty picture
        bins = pooling.bin_edges(0, self.shape[2], min(self.shape[2], PICTURE_BINS)), pooling.bin_edges(0, 0, 1)
        planes = list(self._iterate_planes()) if planes is None else planes
        if small_maps.is_worth_batch(self._request, len(planes)):
            return self._gather_batch_statistics(planes, list(statistics))
        return [gathered for gathered, _ in self._traverse(planes, *bins, statistics)]

    def _gather_batch_statistics(self, planes: Sequence[Plane], names: Sequence[str]) -> list[passes.TraversalResult]:
        """Return the statistics of many small planes, from one pass."""
        pairs = [(plane.b, plane.h) for plane in planes]
        found, below = small_maps.gather_statistics(self._request, self._index_pairs(pairs), names)
        self._denominators.add(pairs, below)
        columns = found.pop("received").unbind()
        by_name = {name: x.unbind() for name, x in found.items()}
        return [
            passes.TraversalResult({name: x[n] for name, x in by_name.items()}, columns[n], self._denominators[pair])
            for n, pair in enumerate(pairs)
        ]

    def _get_denominators(self, plane: Plane) -> Denominators:
        """Return the denominators of the rows of a plane, computed once."""
        if (plane.b, plane.h) not in self._denominators:
            self._gather_statistics([plane])
        return self._denominators[plane.b, plane.h]

    def _apply_with_denominators(self, function: Callable[[Plane, Denominators], Tensor]) -> Tensor:
        """Apply a function of a plane and its denominators to each plane, and stack the results."""
        self._gather_statistics([plane for plane in self._iterate_planes() if (plane.b, plane.h) not in self._denominators])
        return self._apply_to_planes(lambda plane: function(plane, self._get_denominators(plane)))

    def _can_use_denominators(self, plane: Plane, rows: int) -> bool:
        """Return whether the denominators of a plane are cached, or worth a traversal for this number of rows."""
        return (plane.b, plane.h) in self._denominators or 2 * rows > plane.shape[0]

    def _iterate_weights(self, plane: Plane, queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield weights (n, m) of queries and keys by index, a part of the queries at a time; keys are in increasing order.

        For a few rows it is cheapest to compute complete rows; for more than half of them the denominators are worth caching.
        """
        known = self._can_use_denominators(plane, len(queries))
        below = self._get_denominators(plane) if known else None
        step = max(1, count_block_numbers(self.device) // max(len(keys) if known else plane.shape[1], 1))
        for start in range(0, len(queries), step):
            part = queries[start : start + step]
            if below is None:
                rows = plane.compute_rows(part)
                weights = rows if len(keys) == plane.shape[1] else rows[:, keys]
            else:
                weights = below[part].weigh(plane.compute_masked_scores(part, keys))
            yield slice(start, start + step), weights

    def draw_picture(self, rows: Tensor, columns: Tensor) -> BinnedWeights:
        """Draw the picture of a map of one matrix, given the edges of its bins in tokens."""
        (plane,) = self._iterate_planes()
        return self._draw_picture(plane, rows, columns)

    def _draw_picture(self, plane: Plane, rows: Tensor, columns: Tensor) -> BinnedWeights:
        ends = [(int(edges[0]), int(edges[-1])) for edges in (rows, columns)]
        if ends == [(0, self.shape[2]), (0, self.shape[3])]:
            return self._traverse([plane], rows, columns, {})[0][1]
        if compiled_passes.can_run_compiled(plane) and self._can_use_denominators(plane, ends[0][1] - ends[0][0]):
            quick = compiled_passes.draw_picture(plane, torch.get_num_threads(), self._get_denominators(plane), rows, columns)
            if quick is not None:
                return quick
        picture = BinnedWeights(plane, rows, columns)
        queries, keys = (torch.arange(*span, device=self.device) for span in ends)
        for part, weights in self._iterate_weights(plane, queries, keys):
            picture.add(queries[part], keys, weights)
        return picture

    def _gather_rows(self, b: Tensor, h: Tensor, i: Tensor, keys: Tensor) -> Tensor:
        """Return the weights of rows at coordinates (n,) on some keys (m,)."""
        rows = i.reshape(-1).to(self.device)
        groups = [(plane, places, rows[places]) for plane, places in self._group_by_plane(b, h)]
        if self._are_rows_batch(groups):
            pairs, order = [(plane.b, plane.h) for plane, *_ in groups], torch.cat([places for _, places, _ in groups])
            weights = small_maps.compute_selected_rows(self._request, self._index_pairs(pairs), groups[0][2]).flatten(0, 1)
            weights = weights if len(keys) == self.shape[3] else weights[:, keys]
            is_sorted = torch.equal(order, torch.arange(len(order), device=self.device))
            return weights if is_sorted else weights[order.argsort()]
        found = self._request.q.new_zeros(b.numel(), len(keys), dtype=score_dtype(self._request.q.dtype))
        for plane, places, queries in groups:
            for part, weights in self._iterate_weights(plane, queries, keys):
                found[places[part]] = weights
        return found

    def _are_rows_batch(self, groups: Sequence[tuple[Plane, Tensor, Tensor]]) -> bool:
        """Return whether rows of planes, their places and queries, are the same few of each, which one product computes."""
        if not groups or not small_maps.are_rows_worth_batch(self._request, len(groups), len(groups[0][2])):
            return False
        (_, _, queries), *others = groups
        return not any(self._can_use_denominators(plane, len(queries)) for plane, *_ in groups) and all(
            torch.equal(x, queries) for *_, x in others
        )

    def _gather_entries(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return the weights at coordinates (n,): from all their rows on all their keys, or one by one if that is less work."""
        found = self._request.q.new_zeros(b.numel(), dtype=score_dtype(self._request.q.dtype))
        i, j = (x.reshape(-1).to(self.device) for x in (i, j))
        for plane, places in self._group_by_plane(b, h):
            i_here, j_here = i[places], j[places]
            (queries, row), (keys, column) = (x.unique(return_inverse=True) for x in (i_here, j_here))
            if self._can_use_denominators(plane, len(queries)) and DOT_PRODUCT_COST * len(places) < len(queries) * len(keys):
                found[places] = passes.compute_pair_weights(plane, self._get_denominators(plane), i_here, j_here)
                continue
            for part, weights in self._iterate_weights(plane, queries, keys):
                inside = (row >= part.start) & (row < part.stop)
                found[places[inside]] = weights[row[inside] - part.start, column[inside]]
        return found

    def _group_by_plane(self, b: Tensor, h: Tensor) -> Iterator[tuple[Plane, Tensor]]:
        """Yield each plane that the coordinates refer to, with the places of its entries in the result."""
        pairs = (b * self.shape[1] + h).reshape(-1)
        for pair in pairs.unique().tolist():
            n, m = divmod(pair, self.shape[1])
            yield Plane(self._request, *self._pairs[n][m]), (pairs == pair).nonzero().squeeze(-1).to(self.device)

    def _multiply(self, function: Any, name: str, x: Tensor, length: int) -> Tensor:
        b, h, *_ = self.shape
        if check_floating(name, x).device != self.device:
            raise ConfigError(f"{name} must be on the map's device, {self.device}; got {x.device}. Use .to(device).")
        if x.dim() != 4 or x.shape[0] != b or not x.shape[1] or h % x.shape[1] or x.shape[2] != length:
            raise ShapeError(f"{name} must be (b, h, t, e) = ({b}, {h} or a divisor, {length}, e), got {tuple(x.shape)}.")
        planes = self._list_planes()
        found: Tensor = function.apply(heads.share(x, h).flatten(0, 1), planes, self._denominators)
        return found.view(b, h, *found.shape[1:])

    def _check_size(self, numbers: int, instead: str, limit_bytes: float = LIMIT_BYTES) -> None:
        """Raise TooLargeError if a result of this many numbers is beyond the limit."""
        check_result_size(numbers * score_dtype(self._request.q.dtype).itemsize, instead, limit_bytes)


def check_result_size(size: int, instead: str, limit_bytes: float) -> None:
    """Raise TooLargeError if a result of this many bytes is beyond the limit; `instead` is what to use."""
    if size > limit_bytes:
        raise TooLargeError(f"the result would take {size:,} bytes, but the limit is {limit_bytes:,}. Use {instead}.")


@dataclass(frozen=True, eq=False)
class Transposed:
    """The transpose of a map, (b, h, k, q)."""

    of: AttentionMap

    def __matmul__(self, r: Tensor) -> Tensor:
        """Compute Aᵀ r, exact and block by block, in r's dtype: r (b, h, q, e) to (b, h, k, e); differentiable in r."""
        return self.of._multiply(weight_products.ApplyTransposedWeights, "r", r, self.of.shape[2])
