"""A budget is a number of keys or a share, and a pyramid keeps its mean."""

import pytest

from regard import ConfigError
from regard.policies.budget import check_budget, count_keys, spread_budget


def test_a_share_is_rounded_down_to_at_least_one_key():
    assert count_keys(0.1, 59, 0, 3).tolist() == [5, 5, 5]
    assert count_keys(0.01, 59, 0, 2).tolist() == [1, 1]
    assert count_keys(7, 59, 0, 2).tolist() == [7, 7]


@pytest.mark.parametrize("tokens", [10, 100, 1000])
def test_a_share_is_the_decimal_number_that_is_written(tokens):
    """0.29 * 100 is 28.999999999999996 in binary floating point."""
    for keys in range(1, tokens + 1):
        assert count_keys(keys / tokens, tokens, 0, 1).tolist() == [keys]


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.5, 0.9])
def test_a_pyramid_falls_and_keeps_the_mean(budget):
    shares = spread_budget(budget, 7)
    assert sum(shares) / 7 == pytest.approx(budget)
    assert list(shares) == sorted(shares, reverse=True)
    assert shares[-1] > 0
    assert shares[0] <= 1


@pytest.mark.parametrize("wrong", [0, -1, 0.0, 1.1, float("nan"), "0.1", None, (), (0,), ((0.5, 0),), True])
def test_what_is_no_budget_is_refused(wrong):
    with pytest.raises(ConfigError, match="budget"):
        check_budget("budget", wrong)


@pytest.mark.parametrize(("budget", "layers", "steepness"), [(3, 4, 20.0), (0.1, 0, 20.0), (0.1, 4, 0.5), (0.1, 4, "20")])
def test_what_is_no_pyramid_is_refused(budget, layers, steepness):
    with pytest.raises(ConfigError):
        spread_budget(budget, layers, steepness=steepness)
