"""A view of a map for detectors: its statistics, the positions of its queries, what they may see, and which of them count."""

import functools
import inspect
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Concatenate, ParamSpec, Protocol, cast

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import AttentionMap, passes
from regard.map.attention_map import Overview, Statistics
from regard.map.plane import BLOCK_NUMBERS, Denominators, Plane
from regard.map.signed_map import SignedMap
from regard.map.weight_sums import MEANS, WeightSums
from regard.mechanism.arguments import check_instance, describe_value
from regard.observe.classification.visibility import Visibility, find_visibility
from regard.observe.score_interval import QueryScores, apply_to_distinct

SAMPLE = 256  # rows, for a detector that samples them
CHANCES = ("previous token", "itself", "first token", "stripe")  # scores whose chance is known
BATCH_ROWS = 256  # batch rows of small matrices that are sampled at a time
SampleScore = Callable[[slice, slice, Tensor, Tensor], Tensor]  # of batch rows, heads, queries (n,), seen (rows, heads, n, k)
P = ParamSpec("P")


class MapView:
    """A view of one map that caches what detectors need: `detector(m)` makes its own, `detector(look)` shares one.

    A query may see a key that the mask shows and the bias does not hide. It counts if it sees something and, where keys are its
    own tokens (`own`), sees its own too, unless no query of its batch row and head does: so a query on padding does not count.
    tokens are ids of the keys, (b, k). `queries`, a slice, restricts the means to these queries.
    """

    def __init__(self, m: AttentionMap, tokens: Tensor | None = None, own: bool = True, queries: slice = slice(None)) -> None:
        if isinstance(m, SignedMap):
            raise ConfigError(
                "scores of heads, such as entropy, are of weights that are at least 0 and sum to 1; entries of "
                f"{m} may be negative, and their rows need not. "
                "Use m.overview(), m.diagonal(back), m.mass(keys), m.top(n) or its entries by index."
            )
        b, h, _, k = check_instance("m", m, AttentionMap, "recording.map(layer) returns one.").shape
        if not b * h:
            raise ShapeError(f"the map is (b, h, q, k) = {m.shape}, which holds no matrix: b and h must be at least 1.")
        if tokens is not None and (not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.shape != (b, k)):
            raise ShapeError(f"tokens must be ids (b, k) = ({b}, {k}), one for each key; got {describe_value(tokens)}.")
        self.map, self.tokens, self.own, self.queries = m, tokens, own, queries
        self.sums: WeightSums | None = None
        self._last: tuple[tuple[int, int], Plane] | None = None

    @cached_property
    def overview(self) -> Overview:
        """The statistics and the picture of one traversal."""
        return self.map.overview()

    @cached_property
    def statistics(self) -> Statistics:
        """The statistics of one traversal, without a picture if the matrices are large."""
        if self.is_batch or "overview" in vars(self):
            return self.overview
        return Statistics(**self.map.planes.gather_all_statistics())

    def gather_sums(self, window: int, share: float, sink: float) -> None:
        """Compute the statistics of small matrices and, as `sums`, what else detectors need, in one pass if there is one.

        Nearby keys are at most `window` away; `share` is that of the heavy hitters, and more weight than `sink` makes the first
        token one. Where a query sees nothing, which queries count is not known from the mask alone, and all is left to the
        detectors.
        """
        if not self.is_batch or "overview" in vars(self):
            return
        found = self.map.planes.gather_batch_sums(self.visibility.request_sums(window, share, sink))
        if found is not None and not found[1].has_blind_query:
            self.statistics, self.sums, self.is_counted = Statistics(**found[0]), found[1], self.is_token

    @cached_property
    def document_means(self) -> dict[str, Tensor]:
        """The `averages` of scores over the queries that count, (3, b, h), by name; empty without `sums`."""
        if self.sums is None or self.queries != slice(None):
            return {}
        return dict(zip(MEANS, self.sums.means.unbind(1), strict=True))

    @property
    def uniform_local_weight(self) -> Tensor | None:
        """The local weight of a head that attends equally to all keys, (b, h), within the window of `sums`; None without."""
        return self.sums.means[2, MEANS.index("local")] if self.sums is not None and self.document_means else None

    @cached_property
    def visibility(self) -> Visibility:
        """What the queries may see by the mask and the bias alone."""
        return find_visibility(self.map.planes, self.own)

    @property
    def positions(self) -> Tensor:
        """The positions of the queries among the keys, (b, q)."""
        return self.visibility.positions

    @property
    def is_token(self) -> Tensor:
        """Whether a query is at a token rather than at padding, which is masked out everywhere or from itself, (b, h, q)."""
        return self.visibility.is_token

    @property
    def hiding_bias(self) -> float:
        """The largest number in the bias that hides its key; -inf if no other number does."""
        return self.visibility.hiding_bias

    def is_visible(self, keys: Tensor) -> Tensor:
        """Return whether each query may see the key given for it, by index (b, q), as (b, h, q); False for an index outside."""
        return self.visibility.is_visible(keys)

    def can_see_all(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether queries may see keys, by index, both broadcasting with each other to (b, h, ...)."""
        return self.visibility.can_see_all(queries, keys)

    def find_first_tokens(self, counted: Tensor) -> list[int]:
        """Return the first key of each batch row that its first query that counts, (b, h, q), may see."""
        return self.visibility.find_first_tokens(counted)

    @cached_property
    def has_visible_keys(self) -> Tensor:
        """Whether a query sees anything, (b, h, q)."""
        return self.statistics.largest != 0

    @cached_property
    def is_counted(self) -> Tensor:
        """Whether a query counts, (b, h, q)."""
        return self.is_token if bool(self.has_visible_keys.all()) else self.has_visible_keys & self.is_token

    @cached_property
    def is_real_key(self) -> Tensor:
        """Whether a key is not padding, (b, h, k): a key whose own query does not count is padding.

        If keys are not the queries' own tokens: whether the first query that counts may see the key.
        """
        are_all = self.is_counted is self.is_token
        return self.visibility.is_real_key if are_all else self.visibility.find_real_keys(self.is_counted)

    @cached_property
    def first_token_indices(self) -> list[int]:
        """The first token of each batch row, by index: the first key that its first counting query may see."""
        return self.visibility.first_tokens if self.is_counted is self.is_token else self.find_first_tokens(self.is_counted)

    @cached_property
    def is_first_token_visible(self) -> Tensor:
        """Whether each query may see the first token, bool (b, h, q): not beyond a window, or in a later document."""
        first = torch.tensor(self.first_token_indices, device=self.map.device)
        return self.is_visible(first.unsqueeze(-1).expand(-1, self.map.shape[2]))

    @cached_property
    def first_token_weight(self) -> Tensor:
        """The weight of each query on the first token, (b, h, q)."""
        if not any(self.first_token_indices):
            return self.statistics.first
        keys = torch.arange(self.map.shape[3], device=self.map.device)
        return self.compute_mass(keys == torch.tensor(self.first_token_indices, device=keys.device).unsqueeze(-1))

    def compute_mass(self, keys: Tensor) -> Tensor:
        """Return the weight of each query on a set of keys, bool (b, k), as (b, h, q)."""
        if bool((keys == keys[:1]).all()):
            return self.map.mass(keys[0])
        return torch.cat([self.map.select(batch=row).mass(some) for row, some in enumerate(keys)])

    @property
    def has_sink(self) -> bool:
        """Whether a sink takes weight away."""
        return self.get_plane(0, 0).request.sinks is not None

    def diagonal(self, back: int) -> Tensor:
        """Return the weight of each query on the key `back` before its own position, (b, h, q)."""
        known = {0: "itself", 1: "previous"}
        return getattr(self.statistics, known[back]) if back in known else self.map.diagonal(back)

    def score_queries(self, found: Tensor, among: Tensor | None = None) -> QueryScores:
        """Return a score of each query (b, h, q), with the queries that count and are in `among`."""
        among = self.is_counted if among is None else apply_to_distinct(torch.logical_and, self.is_counted, among)
        if self.queries == slice(None):
            return QueryScores(found, among)
        chosen = torch.zeros_like(among)
        chosen[..., self.queries] = among[..., self.queries]
        return QueryScores(found, chosen)

    @cached_property
    def visible_counts(self) -> QueryScores:
        """How many keys a query may see, of at most 256 of the queries that count."""
        return self.score_sample(lambda rows, heads, queries, seen: seen.sum(-1))

    def score_sample(self, score: SampleScore) -> QueryScores:
        """Return, for at most 256 queries of each row, a score that depends on which keys they may see, bool (n, k)."""
        b, h, q, k = self.map.shape
        if self.is_batch:  # with at most as many queries as a sample has
            return self._score_every_query(score)
        every = torch.arange(k, device=self.map.device)
        found = torch.zeros(b, h, q, dtype=torch.float64, device=self.map.device)
        sampled = torch.zeros(b, 1, q, dtype=torch.bool, device=self.map.device)
        step = h if self.has_shared_mask else 1  # heads at a time
        count = max(1, BLOCK_NUMBERS // max(step * k, 1))
        for row in range(b):
            for queries in select_spaced(self.is_counted[row].any(0), SAMPLE).split(count):
                sampled[row, 0, queries] = True
                for head in range(0, h, step):
                    seen = self.can_see(row, head, queries.unsqueeze(-1), every)
                    place = slice(row, row + 1), slice(head, head + step), queries
                    found[place] = score(*place, seen[None, None]).double()
        return self.score_queries(found, sampled)

    def _score_every_query(self, score: SampleScore) -> QueryScores:
        """Return `score_sample` of small matrices, whose queries are all in the sample."""
        b, h, q, _ = self.map.shape
        seen, queries = self.visibility.visible_keys, torch.arange(q, device=self.map.device)
        step = b if len(seen) == 1 else BATCH_ROWS
        found = [
            score(rows, slice(None), queries, seen if len(seen) == 1 else seen[rows]).double()
            for rows in (slice(start, start + step) for start in range(0, b, step))
        ]
        scores = found[0] if len(found) == 1 else torch.cat([part.expand(-1, h, -1) for part in found])
        return self.score_queries(scores.expand(b, h, q))

    def can_see(self, row: int, head: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether queries may see keys, by index, the two broadcasting."""
        plane = self.get_plane(row, head)
        seen = plane.can_see(queries, keys).expand(torch.broadcast_tensors(queries, keys)[0].shape)
        return seen if plane.bias is None else seen & ~(plane.bias[queries, keys] <= self.hiding_bias)

    @property
    def has_shared_mask(self) -> bool:
        """Whether the rule lets all heads see the same keys."""
        request = self.get_plane(0, 0).request
        return request.mask.heads == 1 and (request.bias is None or request.bias.shape[1] == 1)

    # The methods below use the map's internals for one of its matrices; nothing else in this package does.

    def get_plane(self, row: int, head: int) -> Plane:
        """Return one matrix of the map; the last one is cached, so that half precision is converted once for each."""
        if self._last is None or self._last[0] != (row, head):
            self._last = (row, head), Plane(self.map.planes.request, *self.map.planes.pairs[row][head])
        return self._last[1]

    @property
    def is_batch(self) -> bool:
        """Whether the matrices of the map are small ones."""
        return self.map.planes.is_batch

    def compute_pairs(self, row: int, head: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the weights of queries (n,), each on its own key in keys (n,)."""
        plane = self.get_plane(row, head)
        return passes.compute_pair_weights(plane, self.map.planes.get_denominators(plane), queries, keys)

    def iterate_blocks(self, row: int, head: int, queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the weights of queries (n,) on keys (m,), by index, in blocks of queries, each with its slice of queries."""
        plane = self.get_plane(row, head)
        below: Denominators = self.map.planes.get_denominators(plane)
        step = max(1, BLOCK_NUMBERS // max(len(keys), 1))
        for start in range(0, len(queries), step):
            part = queries[start : start + step]
            yield slice(start, start + len(part)), below[part].weigh(plane.compute_masked_scores(part, keys))


def select_spaced(among: Tensor, n: int) -> Tensor:
    """Return the indices of n evenly spaced true entries of bool (q,); all of them if there are no more than n."""
    found = among.nonzero().flatten()
    n = min(n, len(found))
    return found[torch.arange(n, device=found.device) * len(found) // max(n, 1)]


def view_map(m: AttentionMap | MapView) -> MapView:
    """Return a view as it is, or a new view of a map."""
    return m if isinstance(m, MapView) else MapView(m)


class Detector(Protocol[P]):
    """A function from a map to the mean score of each head, (b, h); `queries` returns the scores of a view's queries."""

    queries: Callable[Concatenate[MapView, P], QueryScores]

    def __call__(self, m: AttentionMap | MapView, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """Return the mean over the queries that count."""


def average_over_queries(queries: Callable[Concatenate[MapView, P], QueryScores]) -> Detector[P]:
    """Make a detector of a function that scores queries."""

    @functools.wraps(queries)
    def detect(m: AttentionMap | MapView, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return queries(view_map(m), *args, **kwargs).mean()

    signature = inspect.signature(queries)
    first, *others = signature.parameters.values()
    shown = first.replace(name="m", annotation=AttentionMap | MapView)
    vars(detect).update(queries=queries, __signature__=signature.replace(parameters=[shown, *others], return_annotation=Tensor))
    return cast(Detector[P], detect)
