import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import EXPONENTIAL, assert_within, gamma, sum_bound, unit_roundoff
from regard import ConfigError
from regard.mechanism import softmax

FORMS = [softmax.naive, softmax.stable, softmax.blockwise]
moderate = st.lists(st.floats(-20, 20), min_size=1, max_size=40)


@given(moderate)
def test_naive_stable_and_blockwise_are_one_function(numbers):
    scores = torch.tensor(numbers, dtype=torch.float64)
    total = sum(math.exp(number) for number in numbers)
    expected = torch.tensor([math.exp(number) / total for number in numbers], dtype=torch.float64)
    for form in FORMS:
        torch.testing.assert_close(form(scores), expected, rtol=1e-12, atol=1e-15)


@given(st.lists(st.floats(-1e30, 1e30) | st.just(-math.inf), min_size=1, max_size=20), st.integers(1, 5))
def test_stable_and_blockwise_give_a_probability_or_a_row_of_zeros_for_any_scores(numbers, block):
    scores = torch.tensor(numbers, dtype=torch.float64)
    blind = all(number == -math.inf for number in numbers)
    for weights in (softmax.stable(scores), softmax.blockwise(scores, block)):
        assert weights.sum().item() == pytest.approx(0 if blind else 1, abs=1e-12)
        assert (weights >= 0).all()


def test_rows_are_normalised_over_the_last_axis_and_no_other():
    scores = torch.randn(2, 3, 5, dtype=torch.float64)
    for form in FORMS:
        torch.testing.assert_close(form(scores).sum(-1), torch.ones(2, 3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_by_sum_fails_on_negative_scores_and_on_a_sum_of_zero():
    assert (softmax.by_sum(torch.tensor([1.0, -2.0, 0.5])) < 0).any()  # no probability: 1 / -0.5
    assert not softmax.by_sum(torch.tensor([1.0, -1.0])).isfinite().any()


def assert_softmax_of_two(found):
    """Compare with the softmax of (n + 1, n), which are both in float32: two exponentials, their sum and a division."""
    expected = torch.tensor([1 / (1 + math.exp(-1)), 1 / (1 + math.e)], dtype=torch.float64)
    assert_within(found, expected, sum_bound(torch.float32, 2 + EXPONENTIAL) * expected)


def test_naive_overflows_where_stable_does_not():
    scores = torch.tensor([1000.0, 999.0])
    assert softmax.naive(scores).isnan().all()
    assert_softmax_of_two(softmax.stable(scores))
    assert softmax.naive(torch.tensor([88.0, 0.0])).isfinite().all()
    assert softmax.naive(torch.tensor([89.0, 0.0])).isnan().any()


@pytest.mark.parametrize("form", [softmax.stable, softmax.blockwise])
def test_a_row_of_minus_infinity_has_weights_and_gradient_of_zero(form):
    scores = torch.full((2, 3), -torch.inf, dtype=torch.float64)
    scores[1] = torch.tensor([0.0, 1.0, 2.0])
    scores.requires_grad_()
    weights = form(scores)
    (weights * torch.arange(6.0, dtype=torch.float64).view(2, 3)).sum().backward()
    assert weights[0].tolist() == [0, 0, 0]
    assert scores.grad[0].tolist() == [0, 0, 0]
    assert scores.grad[1].abs().min() > 0


def test_nan_in_is_nan_out_in_its_own_row():
    scores = torch.zeros(2, 3)
    scores[0, 1] = torch.nan
    for form in FORMS:
        assert form(scores).isnan().any(-1).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_sum_does_not_stall_in_half_precision(dtype):
    n = 50_000
    rounding = unit_roundoff(dtype) * max(1, n * torch.finfo(dtype).smallest_normal)  # 1 / n is no normal float16
    allowed = rounding + gamma(torch.float32, n + EXPONENTIAL, alike=True)
    for form in (softmax.stable, softmax.blockwise):
        weights = form(torch.zeros(1, n, dtype=dtype))
        assert weights.dtype == dtype
        assert_within(weights.double().sum(-1), torch.ones(1), allowed)


@pytest.mark.parametrize("form", [softmax.naive, softmax.stable, softmax.blockwise])
def test_gradients_are_those_of_finite_differences(form):
    scores = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(form, (scores,))


def test_a_block_of_no_scores_is_refused():
    with pytest.raises(ConfigError, match="block must be a whole number of at least 1, got 0"):
        softmax.blockwise(torch.zeros(3), block=0)
