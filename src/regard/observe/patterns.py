"""Attention patterns: rules that state on which earlier keys a kind of head attends, and how closely a head follows them.

A pattern relates query i, at position p, to key j. The weight on it is summed without the matrix: queries and keys are grouped
by token, and each group is a small matrix, computed in blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.observe.map_view import MapView, average_over_queries
from regard.observe.score_interval import QueryScores

PAIRS = 2**18  # pairs of query and key per step
FEW = 128  # keys of a query, up to which its pairs are computed singly, together with those of other groups
ROWS = 512  # queries per block of a larger group: later queries have more keys


class Pattern(Protocol):
    """A rule on positions."""

    def match(self, look: MapView) -> "PatternMatch":
        """Return the weight of each query on the pattern."""


@dataclass(frozen=True, eq=False)
class PatternMatch:
    """The weight of each query on the keys of a pattern, and how many of these keys it may see, both (b, h, q)."""

    weight: Tensor
    count: Tensor


@dataclass(frozen=True)
class Duplicate:
    """token[j] = token[p], j < p: every earlier occurrence of the query's own token."""

    def match(self, look: MapView) -> PatternMatch:
        return match_occurrences(look, 0)


@dataclass(frozen=True)
class Induction:
    """token[j - 1] = token[p], j - 1 < p: the token after every earlier occurrence of the query's own token."""

    def match(self, look: MapView) -> PatternMatch:
        return match_occurrences(look, 1)


@average_over_queries
def score(look: MapView, pattern: Pattern) -> QueryScores:
    """Return the mean of Σ w_j over the keys of a pattern, of the queries that may see one, (b, h); NaN where there is none.

    With Induction this is the prefix matching score of Olsson et al. 2022, which they measure on repeated random tokens.
    """
    found = pattern.match(look)
    return look.score_queries(found.weight, found.count > 0)


def find_text_keys(look: MapView) -> Tensor:
    """Return whether a key is of the text, bool (b, k): padding is a key whose own query does not count and that none sees."""
    real = look.is_real_key
    if bool(real.all()):
        return real[:, 0]
    counted = look.is_counted.to(look.statistics.largest.dtype).unsqueeze(-1)
    return (real | ((look.map.mT @ counted).squeeze(-1) > 0)).any(1)


def match_occurrences(look: MapView, after: int) -> PatternMatch:
    """Return the weight of each query on the keys `after` places after an earlier occurrence of its token."""
    tokens = require_tokens(look)
    b, h, q, _ = look.map.shape
    weight = torch.zeros_like(look.statistics.largest, dtype=torch.float64)
    count = torch.zeros(b, h, q, dtype=torch.int64, device=weight.device)
    among = find_text_keys(look) if after else torch.ones_like(tokens, dtype=torch.bool)  # padding is hidden itself
    for row in range(b):
        groups = group_by_token(tokens[row], look.positions[row], after, among[row])
        for head in range(h):
            seen_before = look.has_shared_mask and head
            for part in groups.iterate_parts():
                add_part(look, (row, head), part, weight, None if seen_before else count)
            if seen_before:
                count[row, head] = count[row, 0]
    return PatternMatch(weight.to(look.statistics.largest.dtype), count)


def add_part(
    look: MapView, at: tuple[int, int], part: tuple[Tensor, Tensor, Tensor | None], weight: Tensor, count: Tensor | None
) -> None:
    """Add one part of a pattern to `weight` and `count`.

    A part is pairs of queries and keys (`among` is None), or a block in which the first `among` keys belong to each query.
    """
    queries, keys, among = part
    if among is None:
        weight[at].index_add_(0, queries, look.compute_pairs(*at, queries, keys).double())
        if count is not None:
            count[at].index_add_(0, queries, look.can_see(*at, queries, keys).long())
        return
    for rows, weights in look.iterate_blocks(*at, queries, keys):
        meant = torch.arange(len(keys), device=keys.device) < among[rows].unsqueeze(-1)
        weight[at][queries[rows]] = weights.where(meant, 0).sum(-1, dtype=torch.float64)
        if count is not None:
            count[at][queries[rows]] = (look.can_see(*at, queries[rows].unsqueeze(-1), keys) & meant).sum(-1)


@dataclass(frozen=True, eq=False)
class TokenGroups:
    """Queries and keys sorted by token, and the range of the keys that belongs to each query."""

    queries: Tensor  # (n,), those with at least one key, by token and then by position
    keys: Tensor  # (m,), in the same order
    start: Tensor  # (n,), where a query's keys begin in `keys`
    count: Tensor  # (n,), the number of a query's keys

    def iterate_parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield queries and keys as pairs, or as a block with the number of keys that belong to each query."""
        few = self.count <= FEW
        yield from self.iterate_pairs(few)
        queries, count = self.queries[~few], self.count[~few]
        starts, sizes = self.start[~few].unique_consecutive(return_counts=True)
        first = 0
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            for here in torch.arange(first, first + size, device=count.device).split(ROWS):
                yield queries[here], self.keys[start : start + int(count[here].max())], count[here]
            first += size

    def iterate_pairs(self, few: Tensor) -> Iterator[tuple[Tensor, Tensor, None]]:
        """Yield every query with every key that belongs to it, for queries with few keys."""
        queries, start, count = self.queries[few], self.start[few], self.count[few]
        for here in torch.arange(len(queries), device=queries.device).split(max(1, PAIRS // FEW)):
            n = count[here]
            within = torch.arange(int(n.sum()), device=n.device) - (n.cumsum(0) - n).repeat_interleave(n)
            yield queries[here].repeat_interleave(n), self.keys[start[here].repeat_interleave(n) + within], None


def group_by_token(tokens: Tensor, positions: Tensor, after: int, is_text: Tensor) -> TokenGroups:
    """Group queries, at their positions, with the keys `after` places after an earlier one of their token in the text."""
    k = len(tokens)
    kinds = tokens.unique(return_inverse=True)[1] if k else tokens
    place = torch.arange(k, device=tokens.device)
    sources = (kinds * k + place)[: k - after][is_text[: k - after]].sort().values  # by token, and then by position
    here = ((positions >= 0) & (positions < k)).nonzero().flatten()
    own = positions[here]
    order = (kinds[own] * k + own).sort()
    start = torch.searchsorted(sources, kinds[own[order.indices]] * k)
    count = torch.searchsorted(sources, order.values) - start  # occurrences before the query itself
    some = count > 0
    return TokenGroups(here[order.indices][some], sources % k + after, start[some], count[some])


def require_tokens(look: MapView) -> Tensor:
    """Return the tokens of a view. Raises ConfigError if it has none."""
    if look.tokens is None:
        raise ConfigError(
            "duplicate and induction compare tokens, and the map has none: pass MapView(m, tokens=ids), with ids (b, k)."
        )
    return look.tokens
