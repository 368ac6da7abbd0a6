"""AttentionMap: the attention matrix as a value that is never stored, and the statistics, pictures and products of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError, TooLargeError
from regard.html_repr import HtmlRepr
from regard.map import additive, indexing, passes, pooling, small_maps, weight_products
from regard.map.map_planes import MapPlanes
from regard.map.pooling import BinnedWeights, How
from regard.map.selected_weights import gather_entries, gather_rows
from regard.mechanism import heads
from regard.mechanism.arguments import check_count, check_floating, check_number
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.request import disable_autocast, make_request
from regard.mechanism.scores import score_dtype
from regard.mechanism.steps import format_tensors

LIMIT_BYTES = 2**30  # of a returned tensor
CERTIFIED_ROWS = 64  # rows of each matrix that a certificate checks by default
Index = int | slice | Sequence[int] | Tensor


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

    def __repr__(self) -> str:
        """Return a line for each statistic, with its shape and dtype."""
        return format_tensors(type(self).__name__, [(one.name, getattr(self, one.name)) for one in fields(self)])


@dataclass(frozen=True, eq=False, repr=False)
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
        request = request._replace(q=request.q.detach(), k=request.k.detach(), v=request.k.detach(), bias=bias, sinks=sinks)
        batch, heads = request.q.shape[:2]
        self.planes = MapPlanes(request, range(batch), range(heads))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (b, h, q, k)."""
        return self.planes.shape

    @property
    def device(self) -> torch.device:
        """The device of q and k, and of every result."""
        return self.planes.device

    @property
    def nbytes(self) -> int:
        """The bytes stored: q, k, bias, sinks, weight, and the denominators of the rows computed so far."""
        return self.planes.nbytes

    @property
    def mT(self) -> "Transposed":
        """The transpose, for a product: m.mT @ r."""
        return Transposed(self)

    def select(self, batch: Index = slice(None), heads: Index = slice(None)) -> "AttentionMap":
        """Return a smaller map of some batch rows and heads, still of four axes, sharing memory."""
        b, h, *_ = self.shape
        rows, columns = self.planes.rows, self.planes.heads
        smaller = object.__new__(AttentionMap)
        smaller.planes = replace(
            self.planes,
            rows=[rows[i] for i in indexing.select_places("batch", batch, b).tolist()],
            heads=[columns[j] for j in indexing.select_places("heads", heads, h).tolist()],
        )
        return smaller

    def __len__(self) -> int:
        """Return the number of batch rows, as of a tensor."""
        return self.shape[0]

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
            return gather_rows(self.planes, b, h, i, keys.to(self.device)).view(*b.shape, len(keys))
        b, h, i, j = indexing.coordinates(self.shape, index)
        return gather_entries(self.planes, b, h, i, j).view(b.shape)

    def logsumexp(self) -> Tensor:
        """Compute log Σ exp of each row's scores and sink, nats, (b, h, q); -inf for a row that sees nothing."""
        if self.planes.is_batch:
            return self.planes.apply_to_batch(passes.logsumexp)
        return self.planes.apply_with_denominators(lambda _, below: below.logsumexp)

    def entropy(self) -> Tensor:
        """Compute -Σ w log w of each row, nats, (b, h, q); 0 for a row that sees nothing."""
        if self.planes.is_batch:
            return self.planes.apply_to_batch(passes.entropy)
        found = self.planes.gather_statistics(self.planes.list_planes(), entropy=passes.entropy)
        return self.planes.split_axis(found.rows["entropy"])

    def received(self) -> Tensor:
        """Compute the sum of each column, (b, h, k)."""
        if self.planes.is_batch:
            return self.planes.apply_to_batch(small_maps.sum_columns)
        return self.planes.split_axis(self.planes.gather_statistics(self.planes.list_planes()).received)

    def mass(self, keys: slice | Tensor) -> Tensor:
        """Compute the weight of each row on a set of keys, a slice or a bool (k,): (b, h, q)."""
        seen = indexing.mark_keys(keys, self.shape[3], self.device)
        keys_seen = seen.nonzero().squeeze(-1)
        if self.planes.is_batch:
            return self.planes.apply_to_batch(lambda batch: batch.weights[..., keys_seen].sum(-1))
        if 2 * len(keys_seen) > len(seen):
            indicator = seen.to(score_dtype(self.planes.request.q.dtype)).view(1, 1, -1, 1)
            return self._multiply("keys", indicator.expand(self.shape[0], -1, -1, -1)).squeeze(-1)
        return self.planes.apply_with_denominators(lambda plane, below: passes.mass(plane, below, keys_seen))

    def diagonal(self, back: int = 0) -> Tensor:
        """Return the weight of each query on the key at its own position minus `back`, (b, h, q); 0 if there is no such key."""
        back = indexing.check_back(back)
        if self.planes.is_batch:
            return self.planes.apply_to_batch(passes.make_diagonal_statistic(back))
        return self.planes.apply_with_denominators(lambda plane, below: passes.diagonal(plane, below, back))

    def top(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the n largest weights of each row and their keys, largest first, both (b, h, q, n)."""
        b, h, q, k = self.shape
        indexing.check_key_count(n, k)
        keys = 64 // torch.finfo(score_dtype(self.planes.request.q.dtype)).bits  # of int64, in numbers of the weights
        self._check_size((1 + keys) * b * h * q * n, "a smaller n or m.select(heads=...)")
        if self.planes.is_batch or self.planes.is_gpu_batch:
            batches = small_maps.iterate_batches(self.planes.request, self.planes.pair_numbers)
            both = zip(*(batch.weights.topk(n) for batch in batches), strict=True)
            values, indices = (torch.cat(parts).view(b, h, q, n) for parts in both)
            return values, indices
        return self.planes.find_top(n)

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
        return self.planes.pool(bins[0], bins[1], how)

    def overview(self) -> Overview:
        """Compute all row and column statistics and a picture of at most 256 x 256 bins, in one traversal."""
        return Overview(**self.planes.gather_overview())

    def __matmul__(self, v: Tensor) -> Tensor:
        """Compute A v, exact and block by block, in v's dtype: v (b, g or h, k, e) to (b, h, q, e); differentiable in v."""
        return self._multiply("v", v)

    def dense(self, limit_bytes: int = LIMIT_BYTES) -> Tensor:
        """Return the matrix itself, (b, h, q, k).

        Raises TooLargeError, stating the bytes, if it is larger than `limit_bytes`, which can be raised.
        """
        b, h, q, k = self.shape
        self._check_size(b * h * q * k, "m[...], m.pooled(rows, columns) or m.top(n), or dense(limit_bytes=...)", limit_bytes)
        if self.planes.is_batch or self.planes.is_gpu_batch:
            return small_maps.compute_weights(self.planes.request, self.planes.pair_numbers).view(b, h, q, k)
        return self.planes.apply(passes.compute_dense)

    def certificate(self, rows: int = CERTIFIED_ROWS) -> Certificate:
        """Compute how exact this map is, from recomputed rows of each matrix.

        The sum of a row and its sink must be 1, or 0 for a row that sees nothing; the error of a row with a NaN is NaN.
        """
        rows, q = check_count("rows", rows), self.shape[2]
        queries = (torch.arange(min(rows, q)) * q // max(min(rows, q), 1)).to(self.device)
        errors = [passes.largest_row_error(plane, self.planes.get_denominators(plane), queries) for plane in self.planes]
        error = float(torch.stack(errors).max()) if errors else 0.0
        return Certificate(error, len(errors) * len(queries), len(queries) == q)

    def __repr__(self) -> str:
        stored = f"{self.nbytes / 1e6:.3g} MB stored"
        additive = "" if self.planes.request.weight is None else ", additive"
        return f"AttentionMap{self.shape}, {self.planes.request.mask}{additive}, {stored}"

    def draw_picture(self, rows: Tensor, columns: Tensor) -> BinnedWeights:
        """Draw the picture of a map of one matrix, given the edges of its bins in tokens."""
        (plane,) = self.planes
        return self.planes.draw_picture(plane, rows, columns)

    def _multiply(self, name: str, x: Tensor, is_transposed: bool = False) -> Tensor:
        b, h, length = *self.shape[:2], self.shape[2 if is_transposed else 3]
        if check_floating(name, x).device != self.device:
            raise ConfigError(f"{name} must be on the map's device, {self.device}; got {x.device}. Use .to(device).")
        if x.dim() != 4 or x.shape[0] != b or not x.shape[1] or h % x.shape[1] or x.shape[2] != length:
            raise ShapeError(f"{name} must be (b, h, t, e) = ({b}, {h} or a divisor, {length}, e), got {tuple(x.shape)}.")
        planes = self.planes.list_planes()
        given = heads.share(x, h).flatten(0, 1), planes, self.planes.denominators, is_transposed
        found: Tensor = weight_products.ApplyWeights.apply(*given)  # type: ignore[no-untyped-call]
        return found.view(b, h, *found.shape[1:])

    def _check_size(self, numbers: int, instead: str, limit_bytes: float = LIMIT_BYTES) -> None:
        """Raise TooLargeError if a result of this many numbers is beyond the limit."""
        check_result_size(numbers * score_dtype(self.planes.request.q.dtype).itemsize, instead, limit_bytes)


def check_result_size(size: int, instead: str, limit_bytes: float) -> None:
    """Raise TooLargeError if a result of this many bytes is beyond the limit; `instead` is what to use."""
    if not check_number("limit_bytes", limit_bytes) >= 0:
        raise ConfigError(f"limit_bytes must be a number of bytes, at least 0; got {limit_bytes}.")
    if size > limit_bytes:
        raise TooLargeError(f"the result would take {size:,} bytes, but the limit is {limit_bytes:,}. Use {instead}.")


@dataclass(frozen=True, eq=False)
class Transposed:
    """The transpose of a map, (b, h, k, q)."""

    of: AttentionMap

    def __matmul__(self, r: Tensor) -> Tensor:
        """Compute Aᵀ r, exact and block by block, in r's dtype: r (b, h, q, e) to (b, h, k, e); differentiable in r."""
        return self.of._multiply("r", r, is_transposed=True)
