"""The scores of sampled queries are those that the detectors compute from whole maps."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import AttentionMap, Causal, Everything, Window
from regard.head_atlas.sampled_rows import (
    DISTANCE_EDGES,
    SCORES,
    WITH_CHANCE,
    score_rows,
    select_queries,
)
from regard.observe.classification.head_scores import HeadOptions, compute_scores
from regard.observe.map_view import MapView

MASKS = [Causal(), Everything(), Window(left=5, right=0), Window(left=3, right=4)]
EQUAL = 1e-10  # float64


def make_map(seed: int, t: int, mask, dtype=torch.float64) -> tuple[AttentionMap, torch.Tensor]:
    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, 3, t, 4, dtype=dtype)
    return AttentionMap(2 * q, 2 * k, mask=mask), torch.randint(0, 6, (t,))


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.sampled_from(MASKS), st.data())
def test_each_score_is_that_of_the_detector(seed, t, mask, data):
    m, ids = make_map(seed, t, mask)
    punctuation = ids == 3
    queries = torch.tensor(sorted(data.draw(st.sets(st.integers(0, t - 1), min_size=1))))
    options = HeadOptions(tokens=ids.unsqueeze(0), classes={"punctuation": punctuation})
    expected = compute_scores(MapView(m, ids.unsqueeze(0)), options)
    found = score_rows(m, ids, queries, punctuation)
    for n, name in enumerate(SCORES):
        every = expected[name]
        assert torch.equal(found.counted[n], every.among[0][:, queries]), name
        off = (found.values[n] - every.values[0][:, queries]).where(found.counted[n], 0)
        assert off.abs().max() < EQUAL * t, name


@given(st.integers(0, 2**32 - 1), st.integers(2, 40), st.sampled_from(MASKS))
def test_the_chance_of_each_score_is_that_of_the_detector(seed, t, mask):
    m, ids = make_map(seed, t, mask)
    expected = compute_scores(MapView(m, ids.unsqueeze(0)), HeadOptions(tokens=ids.unsqueeze(0)))
    found = score_rows(m, ids, torch.arange(t), ids == 3)
    for n, name in enumerate(WITH_CHANCE):
        chance = found.chances[n].where(found.counted[n], 0).sum(-1) / found.counted[n].sum(-1)
        assert torch.allclose(chance, expected[name].chance[0], rtol=0, atol=EQUAL, equal_nan=True), name


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from(MASKS))
def test_sums_by_distance_are_those_of_the_matrix(seed, t, mask):
    m, ids = make_map(seed, t, mask)
    found = score_rows(m, ids, torch.arange(t), ids == 3)
    weights, seen = m.dense()[0], mask.table(t, t).expand(1, 3, t, t)[0]
    away = torch.arange(t).unsqueeze(-1) - torch.arange(t)
    for n, (low, high) in enumerate(itertools.pairwise(DISTANCE_EDGES)):
        inside = (away >= low) & (away < high)
        assert torch.equal(found.distance_counts[:, n], (seen & inside).sum((1, 2)))
        assert (found.distance_sums[:, n] - (weights * inside).sum((1, 2))).abs().max() < EQUAL


@given(st.integers(1, 3000), st.integers(1, 200), st.integers(0, 10_000))
def test_queries_are_evenly_spaced_and_differ_between_documents(length, count, document):
    queries = select_queries(length, count, document)
    assert len(queries) == min(length, count)
    assert len(queries.unique()) == len(queries)
    assert int(queries.min()) >= 0
    assert int(queries.max()) < length
    gaps = queries.diff()
    assert not len(gaps) or int(gaps.max() - gaps.min()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_lower_precision_is_scored_in_float32(dtype):
    m, ids = make_map(0, 40, Causal(), dtype)
    assert score_rows(m, ids, torch.arange(40), ids == 3).rows.dtype == torch.float32
