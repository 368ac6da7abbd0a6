"""How values are laid out on a scale."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bounds import sum_bound
from regard import ConfigError
from regard.show.color_scale import MAX_LINEAR_TOKENS, LinearScale, Log, choose_scale


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=11))
def test_the_ends_of_a_scale_are_finite_and_in_order_whatever_the_values(values):
    for scale in (LinearScale(), LinearScale(low=0), Log(), Log(low=1e-4)):
        low, high = scale.ends(values)
        assert low < high < math.inf


def test_colour_is_even_while_attention_lies_on_large_weights_and_goes_by_ratios_where_much_lies_on_small_ones():
    sharp = torch.eye(20, dtype=torch.float64).clamp(min=0.01).tril()
    spread = torch.ones(20, 20, dtype=torch.float64).tril() / torch.arange(1, 21).unsqueeze(1)
    assert choose_scale(sharp, 20) == LinearScale(low=0)
    assert choose_scale(spread[:6, :6], 6) == LinearScale(low=0)
    low, high = choose_scale(spread, 20).ends([])
    assert isinstance(choose_scale(spread, 20), Log)
    assert low == pytest.approx(0.05, abs=sum_bound(torch.float32, 4, 0.05))  # rounded, and between two of its neighbours
    assert high == 1
    assert isinstance(choose_scale(sharp, MAX_LINEAR_TOKENS + 1), Log)


@pytest.mark.parametrize("weights", [torch.zeros(3), torch.tensor([math.nan, 1.0]), torch.tensor([1e-30])])
@pytest.mark.parametrize("tokens", [2, MAX_LINEAR_TOKENS + 1])
def test_of_any_weights_there_is_a_scale(weights, tokens):
    low, high = choose_scale(weights, tokens).ends(weights.tolist())
    assert low < high < math.inf


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1)])
@pytest.mark.parametrize("scale", [LinearScale, Log])
def test_a_scale_that_does_not_go_up_is_refused(scale, low, high):
    with pytest.raises(ConfigError, match="low must be below high"):
        scale(low, high)
