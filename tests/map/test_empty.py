"""Maps without queries, without keys or without matrices: right answers of size 0, or one sentence."""

import math

import pytest
import torch

from regard import AttentionMap, Causal, Everything, ShapeError, attend, compare
from regard.observe import detectors

B, H, G, D = 2, 6, 3, 5
SIZES = [(0, 7), (5, 0), (0, 0)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def make_map(q, k, dtype=torch.float64, mask=None):
    return AttentionMap(torch.randn(B, H, q, D).to(dtype), torch.randn(B, G, k, D).to(dtype), mask or Causal())


@pytest.mark.parametrize("mask", [Everything(), Causal()])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q", "k"), SIZES)
def test_a_map_without_queries_or_keys_answers_every_question_in_its_shape(q, k, dtype, mask):
    m = make_map(q, k, dtype, mask)
    found = m.overview()
    for name in ("logsumexp", "entropy", "largest", "distance", "first", "itself", "previous"):
        expected = torch.full((B, H, q), -math.inf if name == "logsumexp" else 0.0)  # a query without keys is blind
        assert torch.equal(getattr(found, name).float(), expected), name
    assert torch.equal(found.received.float(), torch.zeros(B, H, k))
    assert found.mean.shape == found.max.shape == (B, H, q, k)
    assert torch.equal(m.logsumexp(), found.logsumexp)
    assert torch.equal(m.entropy(), found.entropy)
    assert m.dense().shape == m[...].shape == attend(*(torch.zeros(B, H, n, D) for n in (q, k, k)), mask).weights.shape
    assert torch.equal(m.mass(slice(None)).float(), torch.zeros(B, H, q))
    assert torch.equal(m.diagonal().float(), torch.zeros(B, H, q))
    assert torch.equal(m.pooled(2, 3).float(), torch.zeros(B, H, 2, 3))
    assert torch.equal((m @ torch.ones(B, H, k, 3)).float(), torch.zeros(B, H, q, 3))
    assert torch.equal((m.mT @ torch.ones(B, H, q, 3)).float(), torch.zeros(B, H, k, 3))
    assert (m.certificate().error, m.certificate().rows) == (0.0, B * H * q)


@pytest.mark.parametrize(("q", "k"), SIZES)
def test_a_score_over_no_query_is_no_number(q, k):
    m = make_map(q, k)
    for score in (
        detectors.weight_on_first,
        detectors.entropy,
        detectors.effective_keys,
        detectors.breadth,
        detectors.local_weight,
        detectors.distance,
    ):
        assert score(m).isnan().all()


@pytest.mark.parametrize(("q", "k"), SIZES)
def test_there_is_no_row_to_compare(q, k):
    with pytest.raises(ShapeError, match="no rows to compare"):
        compare(make_map(q, k), make_map(q, k))


@pytest.mark.parametrize(
    "question", [lambda m: m.overview(), lambda m: m.mass(slice(None)), lambda m: m.dense(), detectors.weight_on_first]
)
def test_a_map_without_matrices_says_so(question):
    with pytest.raises(ShapeError, match="which holds no matrix"):
        question(make_map(3, 4).select(heads=[]))


@pytest.mark.parametrize("part", [slice(3, 3), slice(9, 2), slice(100, None)])
def test_a_tile_of_nothing_is_0_in_every_bin(part):
    m = make_map(5, 7)
    for how in ("mean", "max", "sum"):
        assert torch.equal(m.tile(part, slice(None), 2, how), torch.zeros(B, H, 2, 2, dtype=torch.float64))
        assert torch.equal(m.tile(slice(None), part, 2, how), torch.zeros(B, H, 2, 2, dtype=torch.float64))
