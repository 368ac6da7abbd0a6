"""Statistics over documents: what is merged is what one run over all documents has, and what lists of numbers say."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import AttentionMap, Causal
from regard.head_atlas.sampled_rows import POSITIONAL, SCORES, score_rows, select_queries
from regard.head_atlas.statistics import (
    EXAMPLES,
    FIRST_EXAMPLE,
    POSITIONS,
    add_rows,
    describe_heads,
    get_edges,
    make_state,
    merge_states,
)
from regard.observe.classification.head_scores import UNBOUNDED_SCORES
from regard.observe.score_interval import estimate_score

LAYERS, HEADS, EXAMPLES_KEPT = 2, 3, 2


def score_document(seed: int, document: int, t: int = 40):
    generator = torch.Generator().manual_seed(1000 * seed + document)
    q, k = torch.randn(2, LAYERS, 1, HEADS, t, 4, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 6, (t,), generator=generator)
    queries = select_queries(t, 24, document)
    return [score_rows(AttentionMap(2 * q[n], 2 * k[n], mask=Causal()), ids, queries, ids == 3) for n in range(LAYERS)], queries


def summarize(seed: int, documents) -> dict[str, torch.Tensor]:
    state = make_state(LAYERS * HEADS, EXAMPLES_KEPT)
    for document in documents:
        layers, queries = score_document(seed, document)
        for n, found in enumerate(layers):
            add_rows(state, slice(n * HEADS, (n + 1) * HEADS), found, queries, document)
    return state


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(0, 7), st.integers(0, 7))
def test_merged_parts_are_the_whole(seed, one, other):
    first, second = sorted((one, other))
    parts = [summarize(seed, range(*ends)) for ends in ((0, first), (first, second), (second, 7))]
    whole, merged = summarize(seed, range(7)), merge_states(merge_states(parts[0], parts[1]), parts[2])
    for name, x in whole.items():
        assert torch.allclose(merged[name].double(), x.double(), rtol=1e-12, atol=1e-12), name


@settings(max_examples=3)
@given(st.integers(0, 99))
def test_the_scores_are_those_of_the_lists_of_all_documents(seed):
    number = 5
    table = describe_heads(summarize(seed, range(number)), [("a", HEADS), ("b", HEADS)], [])
    documents = [score_document(seed, document)[0] for document in range(number)]
    for row in table:
        for place, name in enumerate((*SCORES, POSITIONAL)):
            if name == POSITIONAL:
                means, count = [float(one[row.layer].of_document[0, row.head]) for one in documents], 0
            else:
                scored = [
                    (one[row.layer].values[place, row.head], one[row.layer].counted[place, row.head]) for one in documents
                ]
                means = [float(values[counted].mean()) for values, counted in scored]
                count = sum(int(counted.sum()) for _, counted in scored)
            limits = (-math.inf, math.inf) if name in UNBOUNDED_SCORES else (0.0, 1.0)
            expected = estimate_score(means, [], count, limits)
            score = row.scores[name]
            assert score.count == expected.count
            assert [score, score.low, score.high] == pytest.approx(
                [expected, expected.low, expected.high], rel=1e-6, nan_ok=True
            )


@pytest.mark.slow
def test_histograms_and_positions_count_every_query_once_in_its_bin():
    state, number = summarize(0, range(4)), 4
    documents = [score_document(0, document) for document in range(number)]
    for place, name in enumerate(SCORES):
        edges = get_edges(name).clone()
        edges[[0, -1]] = torch.tensor([-math.inf, math.inf], dtype=torch.float64)  # a sum of weights is 1 up to rounding
        assert torch.equal(state["histogram"][place].sum(-1), state["queries"][place])
        assert torch.equal(state["position_counts"][place].sum(-1), state["queries"][place])
        for layer in range(LAYERS):
            for head in range(HEADS):
                values = torch.cat([one[layer].values[place, head][one[layer].counted[place, head]] for one, _ in documents])
                at = torch.cat([queries[one[layer].counted[place, head]] for one, queries in documents])
                bins = itertools.pairwise(edges)
                counts = [int(((values >= low) & (values < high)).sum()) for low, high in bins]
                assert state["histogram"][place, layer * HEADS + head].tolist() == counts
                for position in range(POSITIONS):
                    inside = (at >= 2**position // 2) & (at < 2**position)
                    assert int(state["position_counts"][place, layer * HEADS + head, position]) == int(inside.sum())
                    total = float(state["position_sums"][place, layer * HEADS + head, position])
                    assert total == pytest.approx(float(values[inside].sum()), abs=1e-9)


@settings(max_examples=5)
@given(st.integers(0, 99))
def test_examples_are_the_best_query_of_each_of_the_best_documents(seed):
    number = 6
    state = summarize(seed, range(number))
    documents = [score_document(seed, document) for document in range(number)]
    for example, name in enumerate(EXAMPLES):
        for layer in range(LAYERS):
            for head in range(HEADS):
                best = []
                for document, (layers, queries) in enumerate(documents):
                    found = layers[layer]
                    scores = found.elsewhere[head] if name == "elsewhere" else found.values[SCORES.index(name), head]
                    counts = queries >= FIRST_EXAMPLE
                    if name != "elsewhere":
                        counts = counts & found.counted[SCORES.index(name), head]
                    if counts.any():
                        at = int(scores.where(counts, -math.inf).argmax())
                        best.append((-float(scores[at]), document, int(queries[at]), found.rows[head, at]))
                best.sort(key=lambda one: one[:2])
                for rank, (value, document, query, row) in enumerate(best[:EXAMPLES_KEPT]):
                    place = example, layer * HEADS + head, rank
                    assert float(state["example_scores"][place]) == -value
                    assert int(state["example_documents"][place]) == document
                    assert int(state["example_queries"][place]) == query
                    keys = state["example_keys"][place]
                    assert torch.equal(state["example_weights"][place], row[keys].double())
                    assert torch.equal(state["example_weights"][place], row.double().sort(descending=True).values[: len(keys)])
