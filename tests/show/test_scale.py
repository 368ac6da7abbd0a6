"""How values are laid out on a scale."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard import ConfigError
from regard.show.scale import Linear, Log


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=11))
def test_the_ends_of_a_scale_are_finite_and_in_order_whatever_the_values(values):
    for scale in (Linear(), Linear(low=0), Log(), Log(low=1e-4)):
        low, high = scale.ends(values)
        assert low < high < math.inf


def test_only_what_can_be_drawn_moves_the_ends():
    assert Linear().ends([2.0, -math.inf, math.nan, 5.0, math.inf]) == (2, 5)
    assert Log().ends([0.0, -3.0, 0.01, 2.0]) == (0.01, 2)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1)])
@pytest.mark.parametrize("scale", [Linear, Log])
def test_a_scale_that_does_not_go_up_is_refused(scale, low, high):
    with pytest.raises(ConfigError, match="from low up to high"):
        scale(low, high)


@pytest.mark.parametrize("low", [0, -1])
def test_a_log_scale_begins_above_zero(low):
    with pytest.raises(ConfigError, match="above 0"):
        Log(low)
