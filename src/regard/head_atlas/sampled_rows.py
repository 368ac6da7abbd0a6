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
from regard.map.weight_sums import SMALLEST_VARIANCE
from regard.mechanism.mask_algebra import Mask
from regard.observe.classification.head_scores import UserScore, compute_user_score
from regard.observe.detectors import MANY, NEAR
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
WITH_CHANCE = SCORES[:5]  # the weights on a few keys, which a head that attends equally to all has too
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

    chances (5, h, n) are what those of WITH_CHANCE would be of a head that attends equally to all keys that the query may see.
    of_document (1 or more, h) are the scores of the document: the share of the variance of the weights that their distance
    explains, then those of functions that the user gave. equal_local () is the mean weight within 16 tokens of a head that
    attends equally to all it may see; distance_sums and distance_counts (h, bins) are the sums of the weights by distance and
    the numbers of visible keys. rows (h, n, k) are the weights; elsewhere (h, n) is the largest weight on a key that is neither
    the first, nor the query's own, nor the one before it.
    """

    values: Tensor
    counted: Tensor
    chances: Tensor
    of_document: Tensor
    equal_local: Tensor
    distance_sums: Tensor
    distance_counts: Tensor
    rows: Tensor
    elsewhere: Tensor


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """The keys that n queries of a document may see, and what follows from them alone: layers with the same mask share it.

    seen (1 or h, n, t); counts (1 or h, n) and distance_counts (1 or h, bins) are numbers of visible keys; equal_local
    (1 or h, n) is the share of them within 16 tokens. repeats are, for the tokens that equal the query's and for those that
    follow such a token, the queries and keys of all pairs and how many a query sees, (1 or h, n).
    """

    seen: Tensor
    counts: Tensor
    equal_local: Tensor
    distance_counts: Tensor
    repeats: list[tuple[Tensor, Tensor, Tensor]]


def select_queries(length: int, count: int, document: int) -> Tensor:
    """Return at most `count` queries of a document of this length, evenly spaced; where they begin differs between documents.

    Query n is floor((n + u) length / count), where u is the fractional part of document times the golden ratio.
    """
    count = min(count, length)
    start = document * GOLDEN % 1
    return torch.tensor([int((n + start) * length / count) for n in range(count)])


def score_rows(
    m: AttentionMap,
    ids: Tensor,
    queries: Tensor,
    punctuation: Tensor,
    scores: Sequence[UserScore] = (),
    shared: list[tuple[Mask, VisibleKeys]] | None = None,
) -> RowScores:
    """Compute the scores of some queries, by index (n,), of a map (1, h, t, t) of a document; ids and punctuation are (t,).

    The definitions are those of `regard.observe.detectors` and `regard.observe.patterns`. `scores` are functions of the map,
    which compute theirs from all queries. `shared` holds the visible keys of each mask that the same queries of the same
    document have met, and gets those of this map; None if there is no other map.
    """
    look, h = MapView(m), m.shape[1]
    rows = m[0, :, queries.to(m.device)].cpu()  # (h, n, t)
    visible = find_visible_keys(look, ids, queries, [] if shared is None else shared)
    sees = visible.counts > 0
    values = compute_values(rows, queries, punctuation, visible)
    duplicates, continuations = (count for *_, count in visible.repeats)
    keys_of_scores = (values["previous token"][1], sees, duplicates, continuations, visible.seen[..., 0])  # of WITH_CHANCE
    chances = [(count.double() / visible.counts.clamp(min=1)).expand(h, -1) for count in keys_of_scores]
    sums, counts = sum_by_distance(rows, queries), visible.distance_counts.expand(h, -1)
    elsewhere = torch.stack([find_largest_elsewhere(head, queries) for head in rows])
    return RowScores(
        torch.stack([values[name][0].double() for name in SCORES]),
        torch.stack([(values[name][1] & sees).expand(h, -1) for name in SCORES]),
        torch.stack(chances),
        torch.stack([explain_by_distance(rows, sums, counts), *(average_user_score(look, score) for score in scores)]),
        visible.equal_local.expand(h, -1)[sees.expand(h, -1)].double().mean(),
        sums,
        counts,
        rows,
        elsewhere,
    )


def compute_values(
    rows: Tensor, queries: Tensor, punctuation: Tensor, visible: VisibleKeys
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each of SCORES of the rows (h, n, t) of some queries, (h, n), and of which queries it is, (1 or h, n)."""
    h, _, t = rows.shape
    seen, sees = visible.seen, visible.counts > 0
    before = queries - 1
    own_rows = torch.arange(len(queries))
    previous = rows[:, own_rows, before.clamp(min=0)]
    sees_previous = seen[:, own_rows, before.clamp(min=0)] & (before >= 0)
    own = rows[:, own_rows, queries]
    first = rows[..., 0]

    places, inside = find_local_keys(queries, t)
    local = (rows.gather(-1, places.expand(h, -1, -1)) * inside).sum(-1)

    summaries = rows @ torch.stack([torch.ones(t), torch.arange(t), punctuation], 1).to(rows.dtype)  # (h, n, 3)
    distance = queries * summaries[..., 0].double() - summaries[..., 1].double()
    entropy = torch.stack([compute_entropy(head) for head in rows])
    breadth = entropy.exp() / visible.counts.clamp(min=1)
    duplicate, induction = (sum_pairs(rows, query, key) for query, key, _ in visible.repeats)
    duplicates, continuations = (count for *_, count in visible.repeats)

    return {
        "previous token": (previous, sees_previous),
        "itself": (own, sees),
        "duplicate": (duplicate, duplicates > 0),
        "induction": (induction, continuations > 0),
        "first token": (first, sees),
        "sink": (first > MANY, sees),
        "local": (local, sees),
        "distance": (distance, sees),
        "keys": (entropy.exp(), sees),
        "entropy": (entropy, sees),
        "breadth": (breadth, sees),
        "punctuation": (summaries[..., 2], sees),
    }


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


def find_visible_keys(look: MapView, ids: Tensor, queries: Tensor, shared: list[tuple[Mask, VisibleKeys]]) -> VisibleKeys:
    """Return the visible keys of some queries: those of an equal mask in `shared`, else computed and put there.

    Only of a mask that is the same for all heads and depends on positions alone; a bias may hide keys too.
    """
    request, device = look.get_plane(0, 0).request, look.map.device
    is_shareable = look.has_shared_mask and request.bias is None and isinstance(request.offset, int) and not request.offset
    for mask, visible in shared if is_shareable else ():
        if mask == request.mask:
            return visible
    (_, h, _, t), at = look.map.shape, (queries.to(device).unsqueeze(-1), torch.arange(look.map.shape[3], device=device))
    seen = torch.stack([look.can_see(0, head, *at).cpu() for head in range(1 if look.has_shared_mask else h)])
    counts, (places, inside) = seen.sum(-1), find_local_keys(queries, t)
    equal_local = (seen.gather(-1, places.expand(len(seen), -1, -1)) & inside).sum(-1) / counts.clamp(min=1)
    pairs = [find_occurrences(ids, queries, after) for after in (0, 1)]
    repeats = [(query, key, sum_pairs(seen, query, key)) for query, key in pairs]
    visible = VisibleKeys(seen, counts, equal_local, sum_by_distance(seen, queries).round().long(), repeats)
    if is_shareable:
        shared.append((request.mask, visible))
    return visible


def find_local_keys(queries: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the keys within 16 tokens of each query, (n, 33), and whether they are inside the document."""
    band = queries.unsqueeze(-1) + torch.arange(-NEAR, NEAR + 1)
    return band.clamp(0, t - 1), (band >= 0) & (band < t)


def find_occurrences(ids: Tensor, queries: Tensor, after: int) -> tuple[Tensor, Tensor]:
    """Return each query with each key `after` places after an earlier occurrence of its token, as two index tensors."""
    source = torch.arange(len(ids)) - after
    matches = (ids[source.clamp(min=0)] == ids[queries].unsqueeze(-1)) & (source >= 0) & (source < queries.unsqueeze(-1))
    query, key = matches.nonzero(as_tuple=True)
    return query, key


def sum_pairs(x: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the sum of the weights, or the number of visible keys, of each query at pairs of a query and a key, (h, n)."""
    return torch.zeros(x.shape[:2], dtype=torch.float64).index_add_(1, query, x[:, query, key].double())


def sum_by_distance(x: Tensor, queries: Tensor) -> Tensor:
    """Return the sum of the weights, or the number of visible keys, of x (h, n, t) in each bin of distance, (h, bins)."""
    # keys at a distance from low to high - 1 are those from query - high + 1 to query - low
    ends = (queries.unsqueeze(-1) - DISTANCE_EDGES + 1).clamp(0, x.shape[-1])
    sums = torch.zeros(x.shape[1], x.shape[2] + 1, dtype=torch.float64)  # of the first keys of each row
    found = []
    for head in x:
        torch.cumsum(head, -1, dtype=torch.float64, out=sums[:, 1:])
        below = sums.gather(-1, ends)
        found.append((below[:, :-1] - below[:, 1:]).sum(0))
    return torch.stack(found)


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
