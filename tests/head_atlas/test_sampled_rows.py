"""The scores of sampled queries are those that the detectors compute from whole maps."""

import itertools
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard import AttentionMap, Causal, Everything, Window
from regard.head_atlas.sampled_rows import (
    DISTANCE_EDGES,
    POSITIONAL,
    SCORES,
    WITH_CHANCE,
    RowScores,
    score_rows,
    select_queries,
)
from regard.observe import detectors
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


@given(st.integers(2, 30), st.lists(st.tuples(st.integers(0, 2**32 - 1), st.sampled_from(MASKS), st.booleans()), max_size=6))
def test_layers_that_share_what_a_mask_shows_have_the_scores_that_each_has_alone(t, layers):
    shared: list = []
    ids = torch.randint(0, 6, (t,))
    queries = torch.arange(0, t, 2)
    for seed, mask, is_biased in layers:
        q, k = torch.randn(2, 1, 3, t, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        bias = torch.zeros(t, t).masked_fill(torch.rand(t, t) < 0.3, -torch.inf) if is_biased else None  # hides keys as well
        m = AttentionMap(q, k, mask=mask, bias=bias)
        found, alone = score_rows(m, ids, queries, ids == 3, (), shared), score_rows(m, ids, queries, ids == 3)
        for field in fields(RowScores):
            assert torch.equal(getattr(found, field.name).nan_to_num(2), getattr(alone, field.name).nan_to_num(2)), field.name
    assert len(shared) == len({mask for _, mask, is_biased in layers if not is_biased})


@given(st.integers(0, 2**32 - 1), st.integers(2, 30), st.sampled_from(MASKS))
def test_without_bins_wider_than_one_the_positional_score_is_that_of_the_detector(seed, t, mask):
    m, ids = make_map(seed, t, mask)
    found = score_rows(m, ids, torch.arange(t), ids == 3)
    expected = detectors.positional_variance(m)[0]
    assert torch.allclose(found.of_document[0], expected, rtol=0, atol=1e-9, equal_nan=True)


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


@given(st.integers(0, 2**32 - 1), st.integers(5, 40))
def test_elsewhere_is_the_largest_weight_that_is_not_on_the_first_token_the_query_or_the_one_before(seed, t):
    m, ids = make_map(seed, t, Causal())
    found = score_rows(m, ids, torch.arange(t), ids == 3)
    assert (found.rows - m.dense()[0]).abs().max() < EQUAL
    for query in range(t):
        others = [key for key in range(t) if key not in (0, query, query - 1)]
        assert torch.equal(found.elsewhere[:, query], found.rows[:, query, others].amax(-1))


@given(st.integers(1, 3000), st.integers(1, 200), st.integers(0, 10_000))
def test_queries_are_evenly_spaced_and_differ_between_documents(length, count, document):
    queries = select_queries(length, count, document)
    assert len(queries) == min(length, count)
    assert len(queries.unique()) == len(queries)
    assert int(queries.min()) >= 0
    assert int(queries.max()) < length
    gaps = queries.diff()
    assert not len(gaps) or int(gaps.max() - gaps.min()) <= 1


def test_over_many_documents_each_query_is_selected_as_often_as_any_other():
    counts = torch.bincount(torch.cat([select_queries(100, 8, document) for document in range(1000)]), minlength=100)
    assert int((counts - 80).abs().max()) <= 4  # a golden sequence is within a few of even


def test_a_score_of_the_user_is_computed_from_the_whole_map():
    def largest_weight(m: AttentionMap) -> torch.Tensor:
        """Return the largest weight of each query."""
        return m.overview().largest

    m, ids = make_map(0, 20, Causal())
    found = score_rows(m, ids, torch.tensor([3]), ids == 3, [largest_weight])
    assert (found.of_document[1] - m.dense()[0].amax(-1).mean(-1)).abs().max() < EQUAL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_lower_precision_is_scored_in_float32(dtype):
    m, ids = make_map(0, 40, Causal(), dtype)
    assert score_rows(m, ids, torch.arange(40), ids == 3).rows.dtype == torch.float32


def test_names_of_scores_are_those_of_heads():
    m, ids = make_map(0, 40, Causal())
    with regard.record(torch.nn.Identity()):
        names = compute_scores(
            MapView(m, ids.unsqueeze(0)), HeadOptions(tokens=ids.unsqueeze(0), classes={"punctuation": ids == 3})
        )
    assert {*SCORES, POSITIONAL} <= names.keys()
