"""Detectors: numbers that describe what a head does with its rows, (b, h) scores, each a mean over the queries that count.

Each takes a map, or a view of one that several detectors share. A score is NaN where no query counts. `detector.queries(look)`
returns the score of each query instead of the mean. Detectors that need tokens are in `patterns.py`; norm-weighted maps have
those that need values.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import AttentionMap, weight_sums
from regard.map.indexing import select_places
from regard.map.plane import BLOCK_NUMBERS, multiply_exactly
from regard.map.weight_sums import DistanceSums, explain_by_distance
from regard.mechanism.arguments import check_count, check_number, describe_value
from regard.observe.classification.visibility import count_share
from regard.observe.map_view import SAMPLE, MapView, average_over_queries, select_spaced, view_map
from regard.observe.score_interval import QueryScores, apply_to_distinct, take_distinct

NEAR = 16  # tokens on either side that count as local
MANY = 0.3  # of a row's weight: above it the first token is a sink
HEAVY = 0.05  # of the keys: the heavy hitters
RECEIVER_DISTANCE = 4  # sentences between one that receives weight and those that give it
ROWS = 256  # rows of the band per block
Queries = Sequence[int] | slice | Tensor


@average_over_queries
def weight_on_previous(m: MapView, back: int = 1) -> QueryScores:
    """Return the mean of A[i, p(i) - back], where p(i) is the query's position: the weight on the token `back` before it.

    The mean is over the queries that may see such a key: the first token has no previous one and is left out.
    Source: Voita et al. 2019 (positional heads); Elhage et al. 2021 (previous token heads).
    """
    return m.score_queries(m.diagonal(back), m.is_visible(m.visibility.list_keys_before(back)))


@average_over_queries
def weight_on_self(m: MapView) -> QueryScores:
    """Return the mean of A[i, p(i)]: the weight on the query's own token.

    Source: Clark et al. 2019, section 3.1.
    """
    return m.score_queries(m.diagonal(0), m.visibility.is_own_token_visible)


@average_over_queries
def weight_on_first(m: MapView) -> QueryScores:
    """Return the mean of A[i, first]: the weight on the first token that is not padding; its own row counts too.

    Source: Xiao et al. 2023; Gu et al. 2024, who take the same mean.
    """
    return m.score_queries(m.first_token_weight)


@average_over_queries
def sink_rate(m: MapView, more_than: float = MANY) -> QueryScores:
    """Return the share of queries with more than `more_than` of their weight on the first token.

    Source: the default 0.3 is the threshold of Gu et al. 2024, who apply it to the mean.
    """
    more_than = check_number("more_than", more_than)
    return m.score_queries((m.first_token_weight > more_than).double())


@average_over_queries
def entropy(m: MapView) -> QueryScores:
    """Return the mean of -Σ w log w, nats: 0 for a query that attends to one key alone.

    Source: Clark et al. 2019, section 3.2; the weight of a sink is not part of the sum.
    """
    return m.score_queries(m.statistics.entropy)


@average_over_queries
def effective_keys(m: MapView) -> QueryScores:
    """Return the mean of e^entropy, in keys: the number a query attends to, if it attended to them equally.

    Source: the effective number of order 1, Hill 1973; also known as the perplexity of the weights.
    """
    return m.score_queries(m.statistics.entropy.exp())


@average_over_queries
def breadth(m: MapView) -> QueryScores:
    """Return the mean of e^entropy / n for a query that may see n keys: 1 where it attends to all of them equally.

    The mean is over at most 256 of the queries that count, evenly spaced. This share is defined here, after Hill 1973.
    """
    return m.score_sample(lambda rows, heads, queries, seen: m.statistics.entropy[rows, heads, queries].exp() / seen.sum(-1))


@average_over_queries
def distance(m: MapView) -> QueryScores:
    """Return the mean of Σ_j w_j (p(i) - j): how many tokens back a query attends; later keys count as negative.

    Source: Vig and Belinkov 2019, whose mean is over weights; here too each row has the same weight.
    """
    return m.score_queries(m.statistics.distance)


@average_over_queries
def local_weight(m: MapView, window: int = NEAR) -> QueryScores:
    """Return the mean of Σ w_j over the keys with `|p(i) - j| <= window`, a share; the rest of a row is its global share.

    Source: the local and broad heads of Clark et al. 2019, section 3; the window is defined here.
    """
    return m.score_queries(sum_nearby_weight(m, check_count("window", window, 0)))


@average_over_queries
def uniform_local_weight(m: MapView, window: int = NEAR) -> QueryScores:
    """Return the local weight, a share, of a head that attends equally to all keys it may see, over at most 256 queries.

    It is what `local_weight` is compared with, and is defined here.
    """
    window = check_count("window", window, 0)

    def compute_local_share(rows: slice, heads: slice, queries: Tensor, seen: Tensor) -> Tensor:
        k = seen.shape[-1]
        own = take_distinct(m.positions[rows])[:, None, queries].unsqueeze(-1)
        near = (own - window).clamp(min=0) + torch.arange(min(2 * window + 1, k), device=seen.device)
        count = max(len(seen), len(near))  # one of each where all batch rows have the same
        inside = near.clamp(max=k - 1).expand(count, seen.shape[1], -1, -1)
        shown = seen.expand(count, -1, -1, -1).gather(-1, inside)
        return (shown & (near <= own + window) & (near < k)).sum(-1).double() / seen.sum(-1)

    return m.score_sample(compute_local_share)


def heavy_hitter_share(m: AttentionMap | MapView, share: float = HEAVY) -> Tensor:
    """Return Σ of the largest column sums / Σ of all of them, for a `share` of the keys, at least one; padding is excluded.

    Source: Zhang et al. 2023 (heavy hitters, by accumulated weight).
    """
    look, share = view_map(m), check_number("share", share)
    if look.sums is not None and look.sums.share == share:
        return look.sums.heavy
    received = sum_columns(look).where(look.is_real_key, 0)
    most = count_share(look.is_real_key, share)
    largest = received.topk(min(int(most.max()), received.shape[-1])).values
    among = torch.arange(largest.shape[-1], device=most.device) < most.unsqueeze(-1)
    return largest.where(among, 0).sum(-1) / received.sum(-1)


def sum_columns(look: MapView) -> Tensor:
    """Return the weight that each key receives from the queries that count, (b, h, k)."""
    received = look.statistics.received
    if not torch.equal(look.is_counted, look.has_visible_keys):
        received = (look.map.mT @ look.is_counted.to(received.dtype).unsqueeze(-1)).squeeze(-1)
    return received.double()


@average_over_queries
def stripe_weight(m: MapView, share: float = HEAVY) -> QueryScores:
    """Return the mean of Σ w_j over the same few keys: the heavy hitters other than the first token, a `share` of the keys.

    Source: the keys with the largest column sums, Zhang et al. 2023 (heavy hitters); heads that attend to the same keys from
    everywhere, Jiang et al. 2024 (vertical lines). Leaving out the first token, which may be a sink, is defined here.
    """
    marked = mark_stripes(m, share)
    if m.sums is not None and m.sums.share == share:
        found = m.sums.stripes
    elif m.is_batch:
        found = weight_sums.sum_marked(m.overview.mean, marked)
    else:
        found = torch.zeros_like(m.statistics.largest, dtype=torch.float64)
        for row, head in itertools.product(*map(range, m.map.shape[:2])):
            found[row, head] = m.map.select(batch=[row], heads=[head]).mass(marked[row, head])[0, 0].double()
    scores = m.score_queries(found)
    keys = m.score_sample(lambda rows, heads, queries, seen: count_common_keys(seen, marked[rows, heads]))
    return add_chance(m, scores, keys.values)


def count_common_keys(seen: Tensor, marked: Tensor) -> Tensor:
    """Return how many of the marked keys (n, h, k) each query sees, (n, h, q), by its table (n or 1, h or 1, q, k)."""
    if seen.shape[1] == 1:
        return multiply_exactly(marked.float(), seen[:, 0].mT.float())
    return (seen & marked.unsqueeze(2)).sum(-1)


def mark_stripes(look: MapView, share: float = HEAVY) -> Tensor:
    """Return whether a key is one of the few with the largest column sums, the first token aside, bool (b, h, k)."""
    if look.sums is not None and look.sums.share == share:
        return look.sums.is_stripe
    received = sum_columns(look).where(look.is_real_key, -1)
    received[torch.arange(len(received)), :, look.first_token_indices] = -1
    return weight_sums.mark_largest(received, count_share(look.is_real_key, check_number("share", share)))


def add_chance(look: MapView, found: QueryScores, keys: Tensor | int) -> QueryScores:
    """Return a score with its chance: the mean of keys / n for queries that may see n keys, of at most 256 that count.

    keys (b, h, q) is the number of keys that the weight of a query is summed over.
    """
    seen = look.visible_counts
    if isinstance(keys, Tensor):
        shares = apply_to_distinct(torch.div, keys, seen.values)
    else:
        shares = apply_to_distinct(lambda counts: keys / counts, seen.values)
    share = QueryScores(shares, apply_to_distinct(torch.logical_and, seen.among, found.among))
    return replace(found, chance=share.mean())


def positional_variance(m: AttentionMap | MapView) -> Tensor:
    """Return the share of the variance of the weights that their distance explains, (b, h): 1 where a head ignores the words.

    1 - Σ (w_ij - mean of all w with the same distance)² / Σ (w_ij - mean of all w)², over what the queries may see, of at most
    256 queries, evenly spaced. NaN where all weights are equal.
    Source: positional heads, Voita et al. 2019; the share is the coefficient of determination of the distance.
    """
    look = view_map(m)
    if look.sums is not None:
        return look.sums.positional
    if look.is_batch:
        counted = take_distinct(look.is_counted)
        return explain_by_distance(weight_sums.sum_by_distance(look.overview.mean, look.visibility.visible_keys, counted))
    b, h, _, k = look.map.shape
    every = torch.arange(k, device=look.map.device)
    found = torch.zeros(b, h, dtype=torch.float64, device=look.map.device)
    for row, head in itertools.product(range(b), range(h)):
        queries = select_spaced(look.is_counted[row, head], SAMPLE)
        own = look.positions[row, queries]
        lowest, highest = (int(own.min()), int(own.max())) if len(own) else (0, 0)
        sums, counts = torch.zeros(2, highest - lowest + k, dtype=torch.float64, device="cpu")
        squares = torch.zeros((), dtype=torch.float64, device="cpu")
        for part, weights in look.iterate_blocks(row, head, queries, every):
            seen = look.can_see(row, head, queries[part].unsqueeze(-1), every)
            shown = weights.double().masked_fill_(~seen, 0).cpu()
            firsts = (highest - own[part]).tolist()  # of the distances, which are neighbors where keys are
            add_rows_at(sums, firsts, shown)
            add_rows_at(counts, firsts, seen.cpu())
            squares += shown.square_().sum()
        found[row, head] = explain_by_distance(DistanceSums(sums, counts, squares))
    return found


def add_rows_at(total: Tensor, firsts: Sequence[int], rows: Tensor) -> None:
    """Add each row (k,), on a CPU, to the next k numbers of `total` from a first one on; by numpy, since rows are short."""
    numbers = total.numpy()
    for first, row in zip(firsts, rows.numpy(), strict=True):
        numbers[first : first + len(row)] += row


def receiver_kurtosis(m: AttentionMap | MapView, sentences: Tensor) -> Tensor:
    """Return the excess kurtosis, over sentences, of the mean weight that each receives from sentences 4 or more later, (b, h).

    A large number means that few sentences receive nearly all of the weight: a receiver head. sentences (b, k) is the number of
    the sentence of each key, from 0. NaN with fewer than 4 sentences that another follows at that distance.
    Source: Bogdan et al. 2025, "Thought anchors"; kurtosis as m4 / m2² - 3.
    """
    look = view_map(m)
    b, h, _, k = look.map.shape
    if not isinstance(sentences, Tensor) or sentences.shape != (b, k) or sentences.dtype != torch.int64:
        raise ShapeError(f"sentences must be the number of each key's sentence, ({b}, {k}); got {describe_value(sentences)}.")
    numbers = sentences.to(look.map.device)
    count = int(numbers.max()) + 1 if k else 0
    members = (numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)).to(look.statistics.largest.dtype)
    weight = (look.map @ members.unsqueeze(1)).double()  # (b, h, q, sentences)
    found = torch.full((b, h), math.nan, dtype=torch.float64, device=look.map.device)
    for row in range(b):
        own = numbers[row, look.positions[row].clamp(0, k - 1)]
        later = (own.unsqueeze(-1) - torch.arange(count, device=own.device) >= RECEIVER_DISTANCE).unsqueeze(0)  # (1, q, s)
        later = later & look.is_counted[row].unsqueeze(-1)
        pairs = later.sum(1) * members[row].sum(0)
        received = weight[row].where(later, 0).sum(1) / pairs.clamp(min=1)
        for head in range(h):
            x = received[head][pairs[head] > 0]
            if len(x) >= RECEIVER_DISTANCE:
                x = x - x.mean()
                found[row, head] = x.pow(4).mean() / x.square().mean() ** 2 - 3
    return found


def check_needle(m: MapView, needle: slice) -> None:
    """Raise ConfigError for a needle that contains none of the keys."""
    if not len(select_places("needle", needle, m.map.shape[3])):
        raise ConfigError(f"needle must be a slice that is not empty, got {needle} of {m.map.shape[3]} keys.")


@average_over_queries
def weight_on_needle(m: MapView, needle: slice, questions: Queries) -> QueryScores:
    """Return the mean of Σ w_j over the keys of the needle, of the queries in `questions`; both are indices.

    This is no retrieval score: Wu et al. 2024 count how often the key attended to most is the token of the needle that the
    model then writes. `needle_hit_rate` is that count without the condition on what is written.
    Raises ConfigError for a needle without keys.
    """
    check_needle(m, needle)
    return m.score_queries(
        scatter_scores(m, questions, lambda rows: m.map[:, :, rows, needle].sum(-1)), mark_queries(m, questions)
    )


@average_over_queries
def needle_hit_rate(m: MapView, needle: slice, questions: Queries) -> QueryScores:
    """Return the share of the queries in `questions` whose key attended to most lies in the needle.

    Source: Wu et al. 2024, without their condition that the model writes the token of that key next.
    Raises ConfigError for a needle without keys.
    """
    check_needle(m, needle)
    inside = torch.zeros(m.map.shape[3], dtype=torch.bool, device=m.map.device)
    inside[select_places("needle", needle, len(inside)).to(inside.device)] = True
    hits = scatter_scores(m, questions, lambda rows: inside[m.map[:, :, rows].argmax(-1)])
    return m.score_queries(hits, mark_queries(m, questions))


def score_classes(look: MapView, classes: Tensor) -> list[QueryScores]:
    """Return the weight of each query on the keys of each class, bool (b, n, k). Raises ShapeError."""
    b, _, _, k = look.map.shape
    is_bool = isinstance(classes, Tensor) and classes.dtype == torch.bool and classes.layout is torch.strided
    if not is_bool or classes.dim() != 3 or classes.shape[::2] != (b, k):
        raise ShapeError(f"classes must be bool (b, n, k) = ({b}, n, {k}), got {describe_value(classes)}.")
    if 2 * int(classes.sum()) > b * k:  # one traversal for all of them
        members = classes.mT.unsqueeze(1).to(look.statistics.largest.dtype)  # (b, 1, k, n)
        mass = (look.map @ members).unbind(-1)
    else:
        mass = tuple(look.compute_mass(classes[:, one]) for one in range(classes.shape[1]))
    return [look.score_queries(one) for one in mass]


def sum_nearby_weight(look: MapView, window: int) -> Tensor:
    """Return the weight of each query on the keys at most `window` away, (b, h, q), from the band of the matrix alone."""
    if look.sums is not None and look.sums.window == window:
        return look.sums.near
    if look.is_batch:
        return weight_sums.sum_near(look.overview.mean, take_distinct(look.positions), window)
    b, h, q, k = look.map.shape
    found = torch.zeros_like(look.statistics.largest)
    step = max(1, min(ROWS, BLOCK_NUMBERS // (h * (ROWS + 2 * window))))
    for row in range(b):
        for start in range(0, q, step):
            own = look.positions[row, start : start + step]
            low, high = max(int(own[0]) - window, 0), min(int(own[-1]) + window + 1, k)
            if low >= high:
                continue
            away = own.unsqueeze(-1) - torch.arange(low, high, device=own.device)
            weights = look.map[row, :, start : start + step, low:high]
            found[row, :, start : start + step] = (weights * (away.abs() <= window)).sum(-1)
    return found


def mark_queries(look: MapView, questions: Queries) -> Tensor:
    """Return queries given by index as bool (q,)."""
    found = torch.zeros(look.map.shape[2], dtype=torch.bool, device=look.map.device)
    found[select_places("questions", questions, len(found)).to(found.device)] = True
    return found


def scatter_scores(look: MapView, questions: Queries, score: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a score of some queries, scattered to all of them, (b, h, q), 0 elsewhere.

    `score` maps a block of queries by index, (n,), to (b, h, n).
    """
    b, h, q, k = look.map.shape
    found = torch.zeros(b, h, q, dtype=torch.float64, device=look.map.device)
    for rows in mark_queries(look, questions).nonzero().flatten().split(max(1, BLOCK_NUMBERS // max(b * h * k, 1))):
        found[:, :, rows] = score(rows).double()
    return found
