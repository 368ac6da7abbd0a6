"""One matrix of a map, for one batch row and one head: its scores and weights, a run of complete rows at a time."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.map import additive
from regard.map.pair_products import multiply_pairs
from regard.mechanism import spans
from regard.mechanism.mask_algebra import EVERYTHING, QueryBlock
from regard.mechanism.request import Request, disable_autocast
from regard.mechanism.scores import score_dtype
from regard.mechanism.spans import Spans

BLOCK_NUMBERS = 2**22  # scores computed at a time: 16 MiB of float32
MOST_ROWS = 256  # of a run
GPU_FACTOR = 8  # by which both are larger on a GPU, where to launch an operation takes longer than 2**22 scores
Pair = tuple[int, int]  # batch row and head
ALIGNED, GAP = 64, 256  # keys: ranges are aligned to the first; gaps up to the second are computed, which is cheaper


@dataclass(frozen=True, eq=False)
class Denominators:
    """The denominator of each row: exp(shift) total, sink included; a total of 0 marks a row that sees nothing.

    The two factors are stored separately, since the logarithm of their product has lost digits if scores are large.
    """

    shift: Tensor  # (n,)
    total: Tensor  # (n,)

    @property
    def logsumexp(self) -> Tensor:
        """log Σ exp of each row's scores, nats; -inf for a row that sees nothing."""
        return self.shift + self.total.log()

    def weigh(self, masked: Tensor) -> Tensor:
        """Turn scores (n, m) into weights, in place."""
        return self.divide(masked.sub_(self.shift.unsqueeze(-1)).exp_())

    def divide(self, exponentials: Tensor) -> Tensor:
        """Turn exp(scores - shift) (n, m) into weights, in place."""
        return exponentials.div_(self.total.masked_fill(self.total == 0, 1).unsqueeze(-1))

    def __getitem__(self, rows: Tensor | slice | int | None) -> "Denominators":
        return Denominators(self.shift[rows], self.total[rows])


class DenominatorCache:
    """The denominators of the matrices of a map, by batch row and head; those computed together stay one tensor."""

    def __init__(self) -> None:
        self._found: dict[Pair, tuple[Denominators, int]] = {}  # denominators (n, q), and which of them
        self._products: list[tuple[Sequence[int], Sequence[int], Denominators]] = []  # those of all pairs of rows and heads
        self._indexed = 0  # of these products, how many are in the dictionary: to list the pairs of many takes a while

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._index_products()

    def __getitem__(self, pair: Pair) -> Denominators:
        below, place = self._index_products()[pair]
        return below[place]

    def add(self, pairs: Sequence[Pair], below: Denominators) -> None:
        """Add the denominators (n, q) of n matrices, of which none is replaced."""
        self._found.update({pair: (below, place) for place, pair in enumerate(pairs) if pair not in self._found})

    def add_product(self, rows: Sequence[int], heads: Sequence[int], below: Denominators) -> None:
        """Add those of each of some heads of each of some batch rows, unless they were added before."""
        if not any(rows == known and heads == others for known, others, _ in self._products):
            self._products.append((rows, heads, below))

    def _index_products(self) -> dict[Pair, tuple[Denominators, int]]:
        """Return the dictionary with all that was added. Threads may do this at once: what is done twice changes nothing."""
        products = self._products[:]
        for rows, heads, below in products[self._indexed :]:
            self.add(list(itertools.product(rows, heads)), below)
        self._indexed = len(products)
        return self._found

    @property
    def nbytes(self) -> int:
        """The bytes of the denominators."""
        return sum(x[place].nbytes for below, place in self._index_products().values() for x in (below.shift, below.total))


@dataclass(frozen=True, eq=False)
class WeightRows:
    """Complete rows of one matrix or of several, (..., n, m); keys outside of `ranges` have weight 0 in all of them."""

    ranges: Spans
    columns: Tensor  # (m,), indices of the keys in the ranges
    positions: Tensor  # (..., n), of the queries among the keys
    masked: Tensor  # the scores that the softmax takes
    weights: Tensor
    denominators: Denominators  # (..., n)


@dataclass(frozen=True, eq=False)
class RowRun(WeightRows):
    """Rows of one matrix, for the queries start to stop."""

    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Plane:
    """The matrix (q, k) of batch row b and head h of a request, in float32 at least.

    A plane lives for one computation: half-precision q and k are converted to float32 once for each.
    """

    request: Request
    b: int
    h: int

    @cached_property
    def q(self) -> Tensor:
        """The queries (q, d)."""
        return self.request.q[self.b, self.h].to(score_dtype(self.request.q.dtype)).resolve_neg()

    @cached_property
    def k(self) -> Tensor:
        """The keys (k, d)."""
        share = self.request.q.shape[1] // self.request.k.shape[1]
        return self.request.k[self.b, self.h // share].to(score_dtype(self.request.k.dtype)).resolve_neg()

    @cached_property
    def weight(self) -> Tensor | None:
        """The weight of additive scores, (d,); None if the scores are dot products."""
        return None if self.request.weight is None else self.request.weight.to(self.q.dtype)

    @cached_property
    def offset(self) -> int:
        """The position of the first query among the keys."""
        offset = self.request.offset
        return offset if isinstance(offset, int) else int(offset.expand(self.request.q.shape[0])[self.b])

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and of keys."""
        return self.request.q.shape[2], self.request.k.shape[2]

    def iterate_run_bounds(self, start: int = 0, queries: int | None = None) -> Iterator[tuple[int, int, Spans]]:
        """Yield start and stop of runs of queries, whose scores each fill at most a block, and the keys they may see."""
        queries = self.shape[0] if queries is None else queries
        most = count_block_numbers(self.request.q.device)
        rows = MOST_ROWS * most // BLOCK_NUMBERS
        while start < queries:
            stop = min(queries, start + rows)
            ranges = self.find_key_ranges(start, stop)
            while stop - start > 1 and (stop - start) * sum(j - i for i, j in ranges) > most:
                stop = start + (stop - start) // 2
                ranges = self.find_key_ranges(start, stop)
            yield start, stop, ranges
            start = stop

    def iterate_runs(self, first: int = 0, last: int | None = None) -> Iterator[RowRun]:
        """Yield complete rows of the whole matrix, or of the queries first to last, as many at a time as a block holds."""
        for start, stop, ranges in self.iterate_run_bounds(first, last):
            masked = self.compute_masked_rows(start, stop, ranges)
            below, exponentials = exponentiate_rows(masked, self.sink)
            positions = torch.arange(start + self.offset, stop + self.offset, device=masked.device)
            columns, weights = self.list_columns(ranges), below.divide(exponentials)
            yield RowRun(ranges, columns, positions, masked, weights, below, start, stop)

    def compute_masked_rows(self, start: int, stop: int, ranges: Spans) -> Tensor:
        """Compute the masked scores (n, m) of these queries with the keys of these ranges.

        The mask is evaluated only for keys that not all of the queries see.
        """
        queries = torch.arange(start, stop, device=self.q.device).unsqueeze(-1)
        masked = self.compute_scores(self.q[start:stop], self.gather_keys(ranges))
        must = self.request.mask.find_certain_keys(self.make_query_block(start, stop), self.shape[1])
        first = 0
        for i, j in ranges:
            if self.bias is not None:
                masked[:, first : first + j - i] += self.bias[start:stop, i:j].to(masked.dtype)
            for m, n in spans.intersection(((i, j),), spans.complement(must, self.shape[1])):
                hidden = ~self.can_see(queries, torch.arange(m, n, device=queries.device))
                masked[:, first + m - i : first + n - i].masked_fill_(hidden, -torch.inf)
            first += j - i
        return masked

    def compute_rows(self, queries: Tensor) -> Tensor:
        """Compute complete rows of weights (n, k) for queries (n,) by index."""
        ranges = self.find_key_ranges(int(queries.min()), int(queries.max()) + 1)
        columns = self.list_columns(ranges)
        masked = self.apply_bias_and_mask(
            self.compute_scores(self.q[queries], self.gather_keys(ranges)), queries.unsqueeze(-1), columns
        )
        below, exponentials = exponentiate_rows(masked, self.sink)
        weights = below.divide(exponentials)
        if len(columns) == self.shape[1]:
            return weights
        return weights.new_zeros(len(queries), self.shape[1]).index_copy_(1, columns, weights)

    def list_columns(self, ranges: Spans) -> Tensor:
        """Return the indices of the keys in some ranges."""
        columns = [torch.arange(i, j, device=self.q.device) for i, j in ranges or ((0, 0),)]
        return columns[0] if len(columns) == 1 else torch.cat(columns)

    def gather_keys(self, ranges: Spans) -> Tensor:
        """Return the keys of some ranges, (m, d); those of a single range are not copied."""
        return self.k[slice(*ranges[0])] if len(ranges) == 1 else torch.cat([self.k[i:j] for i, j in (*ranges, (0, 0))])

    def find_key_ranges(self, start: int, stop: int) -> Spans:
        """Compute the ranges of keys outside which these queries see nothing."""
        may = self.request.mask.find_possible_keys(self.make_query_block(start, stop), self.shape[1])
        return spans.align_spans(spans.merge_spans(may, GAP), ALIGNED, self.shape[1])

    def make_query_block(self, start: int, stop: int) -> QueryBlock:
        """Describe these queries as the bounds of a mask take them."""
        return QueryBlock(start, stop, self.offset, self.offset)

    @property
    def sink(self) -> Tensor | None:
        """The score of this head's sink."""
        return None if self.request.sinks is None else self.request.sinks[self.h].to(self.q.dtype)

    def compute_masked_scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute the scores (n, m) that the softmax takes, of queries (n,) and keys (m,) by index."""
        return self.apply_bias_and_mask(self.compute_scores(self.q[queries], self.k[keys]), queries.unsqueeze(-1), keys)

    def score_pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Compute the scores (n,) that the softmax takes, of queries (n,) and keys (n,) by index, pair by pair."""
        if self.weight is None:
            scores = multiply_pairs(self.q, self.k, queries, keys)
        else:
            scores = additive.score_pairs(self.q[queries], self.k[keys], self.weight)
        return self.apply_bias_and_mask(self.scale_and_cap(scores), queries, keys)

    def compute_scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Compute scaled and capped scores of queries and keys, (n, m): q kᵀ or additive."""
        return self.scale_and_cap(multiply_exactly(q, k.T) if self.weight is None else additive.scores(q, k, self.weight))

    def scale_and_cap(self, scores: Tensor) -> Tensor:
        """Scale and cap scores, in place."""
        scores.mul_(self.request.scale)
        softcap = self.request.softcap
        return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)

    def apply_bias_and_mask(self, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Add the bias to scores and apply the mask, in place; queries and keys by index broadcast to the scores."""
        if self.bias is not None:
            scores += self.bias[queries, keys].to(scores.dtype)
        if self.request.mask != EVERYTHING:
            scores.masked_fill_(~self.can_see(queries, keys), -torch.inf)
        return scores

    @cached_property
    def bias(self) -> Tensor | None:
        """What is added to the scores, (q, k)."""
        bias = self.request.bias
        if bias is None:
            return None
        return bias[self.b if len(bias) > 1 else 0, self.h if bias.shape[1] > 1 else 0].expand(self.shape)

    def can_see(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether queries may see keys, by index, the two broadcasting; computed on the map's device."""
        queries, keys = (x.to(self.request.q.device) for x in (queries, keys))
        b, h = (torch.tensor([index], device=queries.device) for index in (self.b, self.h))
        return self.request.mask.can_see(b, h, queries, keys, self.request.offset)


def count_block_numbers(device: torch.device) -> int:
    """Return the number of scores that are computed at a time: 16 MiB of float32, 128 MiB on a GPU."""
    return GPU_FACTOR * BLOCK_NUMBERS if device.type == "cuda" else BLOCK_NUMBERS


def multiply_exactly(a: Tensor, b: Tensor) -> Tensor:
    """Compute a b with autocast off, which would round it."""
    with disable_autocast(a.device):
        return a @ b


def exponentiate_rows(masked: Tensor, sink: Tensor | None) -> tuple[Denominators, Tensor]:
    """Compute the denominators of complete rows of scores (n, m), and exp(scores - shift), (n, m)."""
    top = masked.detach().amax(-1, keepdim=True) if masked.shape[-1] else masked.new_full((len(masked), 1), -torch.inf)
    top = top if sink is None else top.maximum(sink)
    shift = top.masked_fill(top == -torch.inf, 0)  # a row that sees nothing: -inf - -inf would be NaN
    exponentials = (masked - shift).exp_()
    total = exponentials.sum(-1)
    total = total if sink is None else total + (sink - shift).exp().squeeze(-1)
    return Denominators(shift.squeeze(-1), total), exponentials
