"""Statistics of heads over documents: sums that can be merged, of which the scores and their intervals are computed.

A state is a dict of tensors of one size, however many documents it is of. S is the number of scores, H that of the heads of all
layers, K that of the examples.

- documents, sums, squares (S + 1 + U, H): of the means of the documents, for each score, for "positional" and for the user's.
- chances (5, H): sums of the means of the documents of what the scores WITH_CHANCE would be by chance.
- queries (S, H): how many queries count. histogram (S, H, bins). position_sums, position_counts (S, H, positions).
- equal_local (H,): the sum over documents of the local weight of a head that attends equally to all it may see.
- distance_sums, distance_counts (H, distances).
- example_scores, example_documents, example_queries (E, H, K); example_keys, example_weights (E, H, K, keys): for each of
  EXAMPLES the queries with the highest scores, one of a document, and their largest weights.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.head_atlas.sampled_rows import DISTANCE_EDGES, POSITIONAL, SCORES, WITH_CHANCE, RowScores
from regard.observe.classification.head_kinds import infer_kind
from regard.observe.classification.head_scores import UNBOUNDED_SCORES
from regard.observe.head_table import Head
from regard.observe.score_interval import Score, estimate_from_sums

ELSEWHERE = "elsewhere"  # the largest weight on a key that is neither the first, nor the query's own, nor the one before it
EXAMPLES = ("previous token", "itself", "duplicate", "induction", "first token", ELSEWHERE)
FIRST_EXAMPLE = 16  # the first query of a document that can be an example: earlier ones have few keys to attend to
EXAMPLE_KEYS = 12  # largest weights of an example
BINS = 20  # of a histogram
EDGES = {  # of the histograms; shares have bins of 0.05
    "distance": torch.tensor([-math.inf, 0, *(2.0**n for n in range(BINS - 2)), math.inf], dtype=torch.float64),
    "keys": torch.tensor([*(2.0**n for n in range(BINS)), math.inf], dtype=torch.float64),
    "entropy": torch.linspace(0, 12, BINS + 1, dtype=torch.float64),
}
SHARE_EDGES = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
POSITIONS = 21  # bins of position: 0, 1, 2 to 3, 4 to 7, and so on
State = dict[str, Tensor]


def make_state(heads: int, examples: int, own_scores: int = 0) -> State:
    """Return the state of no documents; own_scores is the number of scores that the user gave."""
    s = len(SCORES)
    of_documents = (s + 1 + own_scores, heads)
    integers = {
        "documents": of_documents,
        "queries": (s, heads),
        "histogram": (s, heads, BINS),
        "position_counts": (s, heads, POSITIONS),
        "distance_counts": (heads, len(DISTANCE_EDGES) - 1),
        "example_documents": (len(EXAMPLES), heads, examples),
        "example_queries": (len(EXAMPLES), heads, examples),
        "example_keys": (len(EXAMPLES), heads, examples, EXAMPLE_KEYS),
    }
    numbers = {
        "sums": of_documents,
        "squares": of_documents,
        "chances": (len(WITH_CHANCE), heads),
        "position_sums": (s, heads, POSITIONS),
        "equal_local": (heads,),
        "distance_sums": (heads, len(DISTANCE_EDGES) - 1),
        "example_weights": (len(EXAMPLES), heads, examples, EXAMPLE_KEYS),
    }
    state = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in integers.items()}
    state |= {name: torch.zeros(shape, dtype=torch.float64) for name, shape in numbers.items()}
    return {**state, "example_scores": torch.full((len(EXAMPLES), heads, examples), -math.inf, dtype=torch.float64)}


def get_edges(score: str) -> Tensor:
    """Return the edges of the bins of a score's histogram."""
    return EDGES.get(score, SHARE_EDGES)


def add_rows(state: State, heads: slice, found: RowScores, queries: Tensor, document: int) -> None:
    """Add the scores of queries (n,) of a document to the heads of one layer, in place."""
    counted, values = found.counted, found.values.where(found.counted, 0)
    number = counted.sum(-1)
    means = torch.cat([values.sum(-1) / number, found.of_document])
    known = ~means.isnan()
    means = means.where(known, 0)
    state["documents"][:, heads] += known
    state["sums"][:, heads] += means
    state["squares"][:, heads] += means.square()
    own = slice(len(WITH_CHANCE))
    state["chances"][:, heads] += (found.chances.where(counted[own], 0).sum(-1) / number[own]).nan_to_num(0)
    state["queries"][:, heads] += number
    for n, score in enumerate(SCORES):
        places = torch.bucketize(found.values[n], get_edges(score)[1:-1], right=True)
        state["histogram"][n, heads].scatter_add_(1, places, counted[n].long())
    positions = torch.frexp(queries.double()).exponent.long().clamp(0, POSITIONS - 1).expand_as(counted)
    state["position_sums"][:, heads].scatter_add_(2, positions, values)
    state["position_counts"][:, heads].scatter_add_(2, positions, counted.long())
    state["equal_local"][heads] += found.equal_local
    state["distance_sums"][heads] += found.distance_sums
    state["distance_counts"][heads] += found.distance_counts
    add_examples(state, heads, found, queries, document)


def add_examples(state: State, heads: slice, found: RowScores, queries: Tensor, document: int) -> None:
    """Add the query with the highest score of each of EXAMPLES, where it is higher than the lowest that is kept."""
    allowed = queries >= FIRST_EXAMPLE
    if not allowed.any():
        return
    scores = [
        found.elsewhere.double()
        if name == ELSEWHERE
        else found.values[SCORES.index(name)].where(found.counted[SCORES.index(name)], -math.inf)
        for name in EXAMPLES
    ]
    best, place = torch.stack(scores).where(allowed, -math.inf).max(-1)  # (E, h)
    example, head = (best > state["example_scores"][:, heads, -1]).nonzero(as_tuple=True)
    if not len(head):
        return
    query = place[example, head]
    weights, keys = found.rows[head, query].topk(min(EXAMPLE_KEYS, found.rows.shape[-1]))
    at = example, head + heads.start
    state["example_scores"][(*at, -1)] = best[example, head]
    state["example_documents"][(*at, -1)] = document
    state["example_queries"][(*at, -1)] = queries[query]
    for name, x in (("example_keys", keys), ("example_weights", weights.double())):
        state[name][(*at, -1)] = torch.nn.functional.pad(x, (0, EXAMPLE_KEYS - x.shape[-1]))
    sort_examples(state, state["example_scores"].shape[-1])


def sort_examples(state: State, most: int) -> None:
    """Sort the examples by score, highest first, then by document, and leave the first `most`, in place."""
    by_document = state["example_documents"].argsort(dim=-1, stable=True)
    by_score = state["example_scores"].gather(-1, by_document).argsort(dim=-1, descending=True, stable=True)
    order = by_document.gather(-1, by_score)[..., :most]
    for name in ("example_scores", "example_documents", "example_queries"):
        state[name] = state[name].gather(-1, order)
    for name in ("example_keys", "example_weights"):
        state[name] = state[name].gather(2, order.unsqueeze(-1).expand(*order.shape, EXAMPLE_KEYS))


def merge_states(one: State, other: State) -> State:
    """Return the state of the documents of both.

    Sums of floating point numbers depend on their order, so that states are merged in the order of their shards.
    """
    most = one["example_scores"].shape[-1]
    merged = {
        name: torch.cat([one[name], other[name]], 2) if name.startswith("example_") else one[name] + other[name] for name in one
    }
    sort_examples(merged, most)
    return merged


def describe_heads(state: State, layers: list[tuple[str, int]], own_scores: Sequence[str]) -> list[Head]:
    """Return the row of each head: its kind by the rule of `regard.heads`, and its scores, with intervals over the documents.

    layers are the names of the layers and the numbers of their heads, own_scores the names of the user's scores.
    """
    rows, n, names = [], 0, (*SCORES, POSITIONAL, *own_scores)
    for layer, (module, heads) in enumerate(layers):
        for head in range(heads):
            scores = {name: compute_score(state, place, n, name) for place, name in enumerate(names)}
            documents = int(state["documents"][SCORES.index("entropy"), n])
            halfway = (1 + float(state["equal_local"][n]) / documents) / 2 if documents else math.nan
            rows.append(Head(layer, module, head, infer_kind(scores, halfway), scores))
            n += 1
    return rows


def compute_score(state: State, place: int, head: int, name: str) -> Score:
    """Return a score of a head by its number and name."""
    documents = int(state["documents"][place, head])
    has_chance = name in WITH_CHANCE and documents
    is_share = name in (*SCORES, POSITIONAL) and name not in UNBOUNDED_SCORES
    return estimate_from_sums(
        documents,
        float(state["sums"][place, head]),
        float(state["squares"][place, head]),
        int(state["queries"][place, head]) if name in SCORES else 0,
        (0.0, 1.0) if is_share else (-math.inf, math.inf),
        float(state["chances"][place, head]) / documents if has_chance else math.nan,
    )
