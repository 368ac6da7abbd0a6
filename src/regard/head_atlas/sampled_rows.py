"""The scores of some queries of a document: the rows of these queries, and what each score of `regard.heads` is for them.

`regard.heads` computes each score from whole maps. An atlas reads many documents, so of each it computes the rows of some
queries only, and the scores from these rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.map import AttentionMap
from regard.observe.detectors import MANY, NEAR, SMALLEST_VARIANCE
from regard.observe.head_scores import UserScore, compute_user_score
from regard.observe.map_view import MapView

GOLDEN = (math.sqrt(5) - 1) / 2
SCORES = (
    "previous token",
    "itself",
    "duplicate",
    "induction",
    "first token",
    "sink",
    "local",
    "distance",
    "keys",
    "entropy",
    "breadth",
    "punctuation",
)
POSITIONAL = "positional"  # the score that is of a document, not of each query
EXACT_DISTANCES, STEPS_PER_OCTAVE, LARGEST_DISTANCE = 32, 4, 2**20


def make_distance_edges() -> Tensor:
    """Return the edges of the bins of distance: of one token each up to 32 either way, then four to a doubling."""
    octaves = int(math.log2(LARGEST_DISTANCE / EXACT_DISTANCES)) * STEPS_PER_OCTAVE
    far = [round(EXACT_DISTANCES * 2 ** (step / STEPS_PER_OCTAVE)) for step in range(1, octaves + 1)]
    ahead = [-edge + 1 for edge in reversed([*range(1, EXACT_DISTANCES + 1), *far])]
    return torch.tensor([*ahead, *range(1, EXACT_DISTANCES + 1), *far])


DISTANCE_EDGES = make_distance_edges()


@dataclass(frozen=True, eq=False)
class RowScores:
    """The scores of n queries of one layer: values and whether they count, both (scores, h, n), in the order of SCORES.

    of_document (1 or more, h) are the scores of the document: the share of the variance of the weights that their distance
    explains, then those of functions that the user gave. equal_local () is the mean weight within 16 tokens of a head that
    attends equally to all it may see; distance_sums and distance_counts (h, bins) are the sums of the weights by distance and
    the numbers of visible keys. rows (h, n, k) are the weights; elsewhere (h, n) is the largest weight on a key that is neither
    the first, nor the query's own, nor the one before it.
    """

    values: Tensor
    counted: Tensor
    of_document: Tensor
    equal_local: Tensor
    distance_sums: Tensor
    distance_counts: Tensor
    rows: Tensor
    elsewhere: Tensor


def select_queries(length: int, count: int, document: int) -> Tensor:
    """Return at most `count` queries of a document of this length, evenly spaced; where they begin differs between documents.

    Query n is floor((n + u) length / count), where u is the fractional part of document times the golden ratio.
    """
    count = min(count, length)
    start = document * GOLDEN % 1
    return torch.tensor([int((n + start) * length / count) for n in range(count)])


def score_rows(
    m: AttentionMap, ids: Tensor, queries: Tensor, punctuation: Tensor, scores: Sequence[UserScore] = ()
) -> RowScores:
    """Compute the scores of some queries, by index (n,), of a map (1, h, t, t) of a document; ids and punctuation are (t,).

    The definitions are those of `regard.observe.detectors` and `regard.observe.patterns`. `scores` are functions of the map,
    which compute theirs from all queries.
    """
    look = MapView(m)
    _, h, _, t = m.shape
    keys = torch.arange(t)
    rows = m[0, :, queries.to(m.device)].cpu()  # (h, n, t)
    at = queries.to(m.device).unsqueeze(-1), keys.to(m.device)
    seen = torch.stack([look.can_see(0, head, *at).cpu() for head in range(1 if look.has_shared_mask else h)])  # (1 or h, n, t)
    sees = seen.any(-1)

    before = queries - 1
    own_rows = torch.arange(len(queries))
    previous = rows[:, own_rows, before.clamp(min=0)]
    sees_previous = seen[:, own_rows, before.clamp(min=0)] & (before >= 0)
    own = rows[:, own_rows, queries]
    first = rows[..., 0]

    band = queries.unsqueeze(-1) + torch.arange(-NEAR, NEAR + 1)
    inside = (band >= 0) & (band < t)
    places = band.clamp(0, t - 1)
    local = (rows.gather(-1, places.expand(h, -1, -1)) * inside).sum(-1)
    visible = seen.sum(-1)
    equal_local = (seen.gather(-1, places.expand(len(seen), -1, -1)) & inside).sum(-1) / visible.clamp(min=1)

    summaries = rows @ torch.stack([torch.ones(t), keys, punctuation], 1).to(rows.dtype)  # (h, n, 3)
    distance = queries * summaries[..., 0].double() - summaries[..., 1].double()
    entropy = torch.stack([compute_entropy(head) for head in rows])
    breadth = entropy.exp() / visible.clamp(min=1)
    duplicate, has_duplicate = sum_occurrences(rows, seen, ids, queries, 0)
    induction, has_induction = sum_occurrences(rows, seen, ids, queries, 1)

    values = {
        "previous token": (previous, sees_previous),
        "itself": (own, sees),
        "duplicate": (duplicate, has_duplicate),
        "induction": (induction, has_induction),
        "first token": (first, sees),
        "sink": (first > MANY, sees),
        "local": (local, sees),
        "distance": (distance, sees),
        "keys": (entropy.exp(), sees),
        "entropy": (entropy, sees),
        "breadth": (breadth, sees),
        "punctuation": (summaries[..., 2], sees),
    }
    sums, counts = sum_by_distance(rows, seen, queries)
    elsewhere = torch.stack([find_largest_elsewhere(head, queries) for head in rows])
    return RowScores(
        torch.stack([values[name][0].double() for name in SCORES]),
        torch.stack([(values[name][1] & sees).expand(h, -1) for name in SCORES]),
        torch.stack([explain_by_distance(rows, sums, counts), *(average_user_score(look, score) for score in scores)]),
        equal_local.expand(h, -1)[sees.expand(h, -1)].double().mean(),
        sums,
        counts,
        rows,
        elsewhere,
    )


def average_user_score(look: MapView, score: UserScore) -> Tensor:
    """Return the mean of a user's score over the queries of each head, (h,). Raises ShapeError."""
    found = compute_user_score(look, score)
    return (found if isinstance(found, Tensor) else found.mean())[0].double().cpu()


def compute_entropy(rows: Tensor) -> Tensor:
    """Compute -Σ w log w of rows of weights (n, t), nats, in float64."""
    return -rows.clamp(min=torch.finfo(rows.dtype).tiny).log_().mul_(rows).sum(-1).double()


def find_largest_elsewhere(rows: Tensor, queries: Tensor) -> Tensor:
    """Return the largest weight of each query (n,) on a key that is neither the first, nor its own, nor the one before it."""
    others = rows.clone()
    others[:, 0] = 0
    for place in (queries, (queries - 1).clamp(min=0)):
        others.scatter_(1, place.unsqueeze(1), 0)
    return others.amax(-1)


def sum_occurrences(rows: Tensor, seen: Tensor, ids: Tensor, queries: Tensor, after: int) -> tuple[Tensor, Tensor]:
    """Return the weight of each query on the keys `after` places after an earlier occurrence of its token, and if it sees one.

    seen are the visible keys, (1 or h, n, t), the same for all heads or of each. The results are (h, n) and (1 or h, n).
    """
    keys = torch.arange(len(ids))
    source = keys - after
    matches = (ids[source.clamp(min=0)] == ids[queries].unsqueeze(-1)) & (source >= 0) & (source < queries.unsqueeze(-1))
    query, key = matches.nonzero(as_tuple=True)
    weight = torch.zeros(rows.shape[:2], dtype=torch.float64).index_add_(1, query, rows[:, query, key].double())
    found = torch.zeros(seen.shape[:2], dtype=torch.int64).index_add_(1, query, seen[:, query, key].long())
    return weight, found > 0


def sum_by_distance(rows: Tensor, seen: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each bin of distance, the sum of the weights and the number of visible keys, (h, bins)."""
    h, _, t = rows.shape
    # keys at a distance from low to high - 1 are those from query - high + 1 to query - low
    ends = (queries.unsqueeze(-1) - DISTANCE_EDGES + 1).clamp(0, t)
    found = []
    for x in (rows, seen):
        at = torch.stack([sum_up_to(head, ends) for head in x])
        found.append((at[..., :-1] - at[..., 1:]).sum(1))
    return found[0], found[1].round().long().expand(h, -1)


def sum_up_to(x: Tensor, ends: Tensor) -> Tensor:
    """Return the sums of the first `ends` (n, m) entries of each row of x (n, t), in float64."""
    sums = x.cumsum(-1, dtype=torch.float64)
    return sums.gather(-1, (ends - 1).clamp(min=0)).masked_fill_(ends == 0, 0)


def explain_by_distance(rows: Tensor, sums: Tensor, counts: Tensor) -> Tensor:
    """Return the share of the variance of the visible weights that the bin of their distance explains, (h,).

    1 - Σ (w - mean of its bin)² / Σ (w - mean)²; NaN where all weights are equal. Weights of hidden keys are 0.
    """
    number = counts.sum(-1)
    mean = sums.sum(-1) ** 2 / number.clamp(min=1)
    squares = torch.stack([head.square().sum(dtype=torch.float64) for head in rows])
    explained = (sums**2 / counts.clamp(min=1)).sum(-1) - mean
    total = squares - mean
    return (explained / total).where(total > SMALLEST_VARIANCE * squares, math.nan)
