"""The bounds hold for computations that are right, and do not hold for those that are wrong."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import (
    assert_within,
    attention_bounds,
    entropy_bound,
    estimate_rounding,
    gamma,
    logsumexp_bound,
    propagate_errors,
    softmax_bound,
    sum_bound,
    unit_roundoff,
)

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(1, 70), st.sampled_from([0.1, 1.0, 3.0]))


def compute(sizes, seed):
    """q, k, v in float32; weights, context and scores in float32, written out, and in float64."""
    queries, keys, width, size = sizes
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (size * torch.randn(1, 2, n, width, generator=generator) for n in (queries, keys, keys))
    found = []
    for x in ((q, k, v), (q.double(), k.double(), v.double())):
        scores = x[0] @ x[1].mT / math.sqrt(width)
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = e / e.sum(-1, keepdim=True)
        found.append((scores, weights, weights @ x[2]))
    return (q, k, v), *found


@given(SIZES, st.integers(0, 2**32 - 1))
def test_attention_in_float32_lies_within_its_bounds_of_float64(sizes, seed):
    (q, k, v), (scores, weights, context), (exact_scores, exact, expected) = compute(sizes, seed)
    bounds = attention_bounds(torch.float32, q, k, v, exact)
    assert_within(scores, exact_scores, bounds.scores)
    assert_within(weights, exact, bounds.weights)
    assert_within(context, expected, bounds.context)
    assert_within(context, expected, propagate_errors(torch.float32, bounds.scores / 2, v, exact).context)
    assert_within(scores.softmax(-1), exact_scores.softmax(-1), bounds.weights)
    assert_within(exact_scores.float().softmax(-1), exact, softmax_bound(torch.float32, exact_scores))
    logsumexp = exact_scores.logsumexp(-1)
    assert_within(scores.logsumexp(-1), logsumexp, logsumexp_bound(torch.float32, bounds, exact, logsumexp))
    entropies = [-(w * w.clamp(min=1e-30).log()).sum(-1) for w in (weights, exact)]
    assert_within(*entropies, entropy_bound(torch.float32, bounds, exact))


@pytest.mark.parametrize("wrong", ["scale", "key", "half"])
def test_attention_that_is_wrong_lies_outside(wrong):
    (q, k, v), _, (scores, exact, expected) = compute((31, 257, 64, 1.0), 0)
    if wrong == "scale":
        weights = (scores * 1.001).softmax(-1)
    elif wrong == "key":
        weights = scores.index_fill(-1, torch.tensor([113]), -math.inf).softmax(-1)
    else:
        weights = exact.bfloat16().double()
    bounds = attention_bounds(torch.float32, q, k, v, exact)
    for found, right, allowed in ((weights, exact, bounds.weights), (weights @ v.double(), expected, bounds.context)):
        with pytest.raises(AssertionError, match="further apart than their bound"):
            assert_within(found, right, allowed)


@given(st.integers(1, 5000), st.integers(0, 2**32 - 1))
def test_a_sum_lies_within_its_bound_in_any_order(n, seed):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    exact, allowed = x.double().sum(), sum_bound(torch.float32, n, float(x.double().abs().sum()))
    for order in (x, x.flip(0), x.sort().values):
        one_by_one = torch.cumsum(order, 0)[-1]
        assert abs(float(one_by_one) - float(exact)) <= allowed
        assert abs(float(order.sum()) - float(exact)) <= allowed


def test_of_many_equal_numbers_the_bound_is_the_larger_one():
    u = unit_roundoff(torch.float32)
    assert gamma(torch.float32, 10_000) < 500 * u < 10_000 * u < gamma(torch.float32, 10_000, alike=True)
    assert gamma(torch.float32, 9) == 9 * u / (1 - 9 * u)


def test_what_a_model_in_float32_is_off_by_lies_within_its_estimate_and_a_wrong_weight_does_not():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(37, 101), torch.nn.Tanh(), torch.nn.Linear(101, 53)).double()
    x = torch.randn(11, 37, dtype=torch.float64)
    exact = model(x)
    allowed = estimate_rounding(model, lambda one: one(x).detach(), 101)
    assert_within(model.float()(x.float()).detach(), exact.detach(), allowed)
    with torch.no_grad():
        model[0].weight[5, 7] += 0.01
        with pytest.raises(AssertionError, match="further apart"):
            assert_within(model(x.float()), exact.detach(), allowed)
