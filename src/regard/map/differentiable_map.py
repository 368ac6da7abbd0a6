"""DifferentiableMap: weights with a graph to the queries and keys, computed in blocks that the backward computes again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.errors import ConfigError, ShapeError
from regard.map import indexing
from regard.map.attention_map import LIMIT_BYTES, AttentionMap, Index, check_result_size
from regard.map.plane import BLOCK_NUMBERS, Plane, exponentiate_rows, multiply_exactly
from regard.map.signed_map import SharedAxes
from regard.mechanism.arguments import describe_value
from regard.mechanism.scores import score_dtype

Block = tuple[Plane, Tensor, Tensor]  # a matrix, the queries (n,) of a block, and the keys (m,) that they may see


class DifferentiableMap(SharedAxes):
    """The weights of a map, (b, h, q, k), with a graph to its queries (b, h, q, d) and keys (b, g, k, d).

    Entries, products and sums are numbers of AttentionMap, with a graph, so that a loss on them is propagated to whatever
    computed q and k; mask, bias and sinks are constants. No weights are kept for the backward, which computes each block again:
    memory is O(T) besides the result.
    """

    def __init__(self, weights: AttentionMap, q: Tensor, k: Tensor) -> None:
        own = weights.planes.request
        if own.weight is not None:
            raise ConfigError("only maps of dot products have a graph to q and k; this one is of additive scores.")
        for name, x, like in (("q", q, own.q), ("k", k, own.k)):
            if x.shape != like.shape:
                raise ShapeError(f"{name} must have the shape of the map's, {tuple(like.shape)}, got {tuple(x.shape)}.")
        self.weights, self.q, self.k = weights, q, k

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every result, float32 at least."""
        return score_dtype(self.q.dtype)

    def select(self, batch: Index = slice(None), heads: Index = slice(None)) -> "DifferentiableMap":
        """Return a smaller map of some batch rows and heads, still of four axes."""
        return DifferentiableMap(self.weights.select(batch, heads), self.q, self.k)

    def __getitem__(self, index: Any) -> Tensor:
        """Return weights by ints, slices, lists and tensors, in the shape that torch would give."""
        index = indexing.expand_index(index)
        size = indexing.count_entries(self.shape, index) * self.dtype.itemsize
        check_result_size(size, "fewer rows, m @ v or m.mass(keys)", LIMIT_BYTES)
        if isinstance(index[3], slice):
            keys = torch.arange(self.shape[3])[index[3]].to(self.device)
            b, h, i = indexing.coordinates(self.shape[:3], index[:3])
            found = self.gather_from_rows((b, h, i), lambda weights, row, _: weights[row][:, keys])
            return found.view(*b.shape, len(keys))
        b, h, i, j = indexing.coordinates(self.shape, index)
        columns = j.flatten().to(self.device)
        found = self.gather_from_rows((b, h, i), lambda weights, row, entries: weights[row, columns[entries]])
        return found.view(b.shape)

    def dense(self) -> Tensor:
        """Return the matrix itself, (b, h, q, k). Raises TooLargeError beyond a gigabyte."""
        return self[...]

    def __matmul__(self, v: Tensor) -> Tensor:
        """Compute A v, block by block, with a graph to q, k and v: v (b, g or h, k, e) to (b, h, q, e), in float32 at least."""
        b, h, _, k = self.shape
        if not isinstance(v, Tensor) or v.dim() != 4 or v.shape[0] != b or not v.shape[1] or h % v.shape[1] or v.shape[2] != k:
            raise ShapeError(f"v must be ({b}, {h} or a divisor, {k}, e), got {describe_value(v)}.")
        return torch.stack(
            [self.join_blocks(n, m, multiply_exactly, v[n, m * v.shape[1] // h]) for n, m in self.list_planes()]
        ).view(*self.shape[:3], -1)

    def entropy(self) -> Tensor:
        """Compute -Σ w log w of each row, nats, (b, h, q); 0 for a row that sees nothing."""
        tiny = torch.finfo(self.dtype).tiny  # of which the logarithm has a gradient
        return self.apply_to_planes(lambda weights: -(weights * weights.clamp(min=tiny).log()).sum(-1))

    def mass(self, keys: slice | Tensor) -> Tensor:
        """Compute the weight of each row on a set of keys, a slice or a bool (k,): (b, h, q)."""
        places = indexing.select_places("keys", keys, self.shape[3]).to(self.device)
        return self.apply_to_planes(lambda weights: weights[:, places].sum(-1))

    def apply_to_planes(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function of complete rows (n, k) to all rows, and stack the results, (b, h, q, ...)."""
        found = [self.join_blocks(n, m, function) for n, m in self.list_planes()]
        return torch.stack(found).view(*self.shape[:3], *found[0].shape[1:])

    def list_planes(self) -> list[tuple[int, int]]:
        """List the batch row and the head, in this map, of each matrix."""
        return [(n, m) for n in range(self.shape[0]) for m in range(self.shape[1])]

    def join_blocks(self, n: int, m: int, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Apply a function of complete rows (n, k), and of tensors given, to all rows of a matrix, a block at a time."""
        queries = torch.arange(self.shape[2], device=self.device)
        blocks = self.iterate_blocks(n, m, queries)
        return torch.cat([self.run_block(block, function, *given) for block in blocks])

    def gather_from_rows(self, rows: Sequence[Tensor], function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Apply a function of complete rows (n, k) to the rows at coordinates b, h and i, each row computed once.

        The function gets the rows of a block, the row there of each of the coordinates that lie in it, and their places.
        """
        b, h, i = (x.flatten() for x in rows)
        places, found = [torch.zeros(0, dtype=torch.int64)], [self.q.new_zeros(0, dtype=self.dtype)]
        for n, m, own_places in indexing.group_pairs(b, h, self.shape[1]):
            queries, order = i[own_places].unique(return_inverse=True)
            start = 0
            for block in self.iterate_blocks(n, m, queries.to(self.device)):
                inside = (order >= start) & (order < start + len(block[1]))
                row, entries = (order[inside] - start).to(self.device), own_places[inside].to(self.device)
                found.append(self.run_block(block, lambda weights, row=row, entries=entries: function(weights, row, entries)))
                places.append(own_places[inside])
                start += len(block[1])
        if len(found) == 1:
            return found[0]
        return torch.cat(found[1:])[torch.cat(places).argsort().to(self.device)]

    def iterate_blocks(self, n: int, m: int, queries: Tensor) -> Iterator[Block]:
        """Yield queries (n,) of a matrix by index, as many at a time as a block of scores holds, with the keys they may see."""
        plane = Plane(self.weights.planes.request, *self.weights.planes.pairs[n][m])
        for part in queries.split(max(1, BLOCK_NUMBERS // max(self.shape[3], 1))):
            yield plane, part, plane.list_columns(plane.find_key_ranges(int(part.min()), int(part.max()) + 1))

    def run_block(self, block: Block, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """Apply a function of complete rows (n, k), and of tensors given, to a block, which the backward computes again."""
        plane, queries, columns = block
        share = self.q.shape[1] // self.k.shape[1]

        def compute(q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
            weights = compute_weights(plane, q[queries].to(self.dtype), k[columns].to(self.dtype), queries, columns)
            rows = weights.new_zeros(len(queries), plane.shape[1]).index_copy(1, columns, weights)
            return function(rows, *(x.to(rows.dtype) for x in given))

        q, k = self.q[plane.b, plane.h], self.k[plane.b, plane.h // share]
        found: Tensor = checkpoint(compute, q, k, *given, use_reentrant=False, preserve_rng_state=False)
        return found


def compute_weights(plane: Plane, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the weights (n, m) of queries (n, d) and keys (m, d), which are all that the queries see, with a graph to both.

    queries (n,) and keys (m,) are their places in the plane, whose mask, bias, softcap, scale and sink apply.
    """
    scores = multiply_exactly(q, k.T) * plane.request.scale
    softcap = plane.request.softcap
    masked = plane.apply_bias_and_mask(
        scores if softcap is None else softcap * (scores / softcap).tanh(), queries.unsqueeze(-1), keys
    )
    below, exponentials = exponentiate_rows(masked, plane.sink)
    return exponentials / below.total.masked_fill(below.total == 0, 1).unsqueeze(-1)
