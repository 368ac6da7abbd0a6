"""The sums of weights that a compiled pass computes with the statistics are those of the weights themselves."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within, sum_bound
from regard import AttentionMap, Causal, Everything, Given
from regard.compiled.threads import can_run_loops
from regard.map import small_maps, weight_sums
from regard.map.weight_sums import SumRequest

B, H, D = 7, 5, 3

pytestmark = pytest.mark.skipif(
    not can_run_loops(), reason="the compiled pass over many matrices needs numba and torch's OpenMP"
)


def build(seed, q, k, mask, offset, is_shared):
    """A map of many small matrices, and a request for its sums."""
    torch.manual_seed(seed)
    rules = {"all": Everything(), "causal": Causal(), "table": Given(torch.rand(B, 1, q, k) < 0.7)}
    m = AttentionMap(torch.randn(B, H, q, D), torch.randn(B, H, k, D), rules[mask], offset=offset)
    queries, keys = torch.arange(q).unsqueeze(-1), torch.arange(k)
    b = torch.arange(B if mask == "table" else 1).view(-1, 1, 1, 1)
    visible = rules[mask].can_see(b, torch.zeros(1, 1, 1, 1, dtype=torch.int64), queries, keys, offset).expand(len(b), 1, q, k)
    shape = (1, 1) if is_shared else (B, H)
    counted, real = torch.rand(*shape, q) < 0.8, torch.rand(*shape, k) < 0.8
    heavy, first = torch.randint(1, 4, shape), torch.randint(0, k, (B,))
    return m, SumRequest(2, 0.1, 0.3, counted | is_shared, visible, real, heavy, first)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 19),
    st.integers(1, 37),
    st.sampled_from(["all", "causal", "table"]),
    st.integers(0, 5),
    st.booleans(),
)
def test_the_sums_of_one_pass_are_those_of_the_weights(seed, q, k, mask, offset, is_shared):
    m, wanted = build(seed, q, k, mask, offset, is_shared)
    with mock.patch.object(small_maps, "LONGEST", 37):
        statistics, found = m.planes.gather_batch_sums(wanted)
        overview = m.overview()
    for name, x in statistics.items():
        assert torch.equal(x, vars(overview)[name]), name
    weights, bound = overview.mean, sum_bound(torch.float32, max(q, k))
    positions = (torch.arange(q) + offset).expand(1, q)
    assert_within(found.near, weight_sums.sum_near(weights.double(), positions, 2), bound)
    of_some = (weights.double() * wanted.counted.unsqueeze(-1)).sum(2).float()
    received = overview.received.where(wanted.counted.all(-1, keepdim=True), of_some).double().where(wanted.real, 0)
    heaviest = received.sort(-1, descending=True).values
    largest = heaviest.where(torch.arange(k) < wanted.heavy.unsqueeze(-1), 0).sum(-1)
    assert_within(found.heavy, largest / received.sum(-1), 1e-12)
    received[torch.arange(B), :, wanted.first] = 0
    assert torch.equal(found.is_stripe, weight_sums.mark_largest(received, wanted.heavy.expand(B, H)))
    assert_within(found.stripes, (weights.double() * found.is_stripe.unsqueeze(2)).sum(-1), bound)
    assert_means(found, wanted, overview, offset)
    by_distance = weight_sums.sum_by_distance(weights, wanted.visible, wanted.counted)
    assert_within(found.positional, weight_sums.explain_by_distance(by_distance), 1e-9)


def assert_means(found, wanted, overview, offset):
    """The means of scores are those of a loop over the queries that count, in float64."""
    means, numbers, chances = (dict(zip(weight_sums.MEANS, x, strict=True)) for x in found.means)
    b, h, q, k = overview.mean.shape
    visible, counted = wanted.visible.expand(b, h, q, k), wanted.counted.expand(b, h, q)
    for place in torch.ones(b, h).nonzero().tolist():
        row = tuple(place)
        first, scores = int(wanted.first[row[0]]), {name: [] for name in weight_sums.MEANS}
        for i in counted[row].nonzero().flatten().tolist():
            weights, seen = overview.mean[row][i].double(), visible[row][i]
            share, own, entropy = torch.tensor(1.0).double() / seen.sum(), i + offset, overview.entropy[row][i].double()
            near = (torch.arange(k) - own).abs() <= wanted.window
            for name, key in (("previous token", own - 1), ("itself", own)):
                if 0 <= key < k and seen[key]:
                    scores[name].append((weights[key], share))
            scores["first token"].append((weights[first], seen[first] * share))
            scores["sink"].append(((weights[first] > wanted.sink).double(), 0))
            scores["local"].append((weights[near].sum(), (near & seen).sum() * share))
            scores["distance"].append(((weights * (own - torch.arange(k))).sum(), 0))
            scores["keys"].append((entropy.exp(), 0))
            stripe = found.is_stripe[row]
            scores["stripe"].append((weights[stripe].sum(), (stripe & seen).sum() * share))
            scores["entropy"].append((entropy, 0))
            scores["breadth"].append((entropy.exp() * share, 0))
        for name, pairs in scores.items():
            assert float(numbers[name][row]) == len(pairs), name
            own = torch.tensor(pairs, dtype=torch.float64).mean(0) if pairs else torch.full((2,), torch.nan).double()
            ours = torch.stack([means[name][row], chances[name][row]])
            bound = sum_bound(torch.float32, max(q, k), max(q, k) + offset)  # the largest distance
            assert_within(ours[0].nan_to_num(-1), own[0].nan_to_num(-1), bound, name)
            assert torch.allclose(ours[1], own[1], rtol=0, atol=1e-14, equal_nan=True), name


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 7))
def test_sums_by_distance_are_those_of_a_loop_over_all_pairs(seed, q, k):
    torch.manual_seed(seed)
    weights = torch.rand(2, 3, q, k, dtype=torch.float64)
    visible, counted = torch.rand(2, 1, q, k) < 0.7, torch.rand(1, 3, q) < 0.7
    found = weight_sums.sum_by_distance(weights, visible, counted)
    sums, pairs = torch.zeros(2, 2, 3, q + k - 1, dtype=torch.float64)
    for b, h, i, j in torch.ones_like(weights).nonzero().tolist():
        if visible[b, 0, i, j] and counted[0, h, i]:
            sums[b, h, j - i + q - 1] += weights[b, h, i, j]
            pairs[b, h, j - i + q - 1] += 1
    assert torch.allclose(found.sums, sums, rtol=0, atol=1e-14)
    assert torch.equal(found.pairs, pairs)
