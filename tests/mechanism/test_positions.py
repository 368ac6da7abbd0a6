import math

import pytest
import torch

from bounds import assert_within, sum_bound
from regard import ConfigError, ShapeError
from regard.mechanism import positions

T, D = 7, 10
ROUNDED = sum_bound(torch.float32, 1)  # of numbers up to 1 that are computed in float64 and returned in float32


def test_sinusoidal_positions_are_the_formula_of_the_paper():
    found = positions.sinusoidal(T, D)
    angles = [[p / 10000 ** (2 * i / D) for i in range(D // 2)] for p in range(T)]
    expected = [[f(angle) for angle in row for f in (math.sin, math.cos)] for row in angles]
    assert_within(found, torch.tensor(expected, dtype=torch.float64), ROUNDED)


@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_rotary_scores_depend_on_distance_alone(pairing):
    torch.manual_seed(0)  # of scores that differ by more than 1e-4
    q, k = torch.randn(1, D, dtype=torch.float64), torch.randn(1, D, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        turned = [positions.rotary(x, torch.tensor([p]), pairing=pairing) for x, p in ((q, i), (k, j))]
        return (turned[0] * turned[1]).sum().item()

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-10)
    assert score(3, 1) == pytest.approx(score(100_003, 100_001), abs=1e-8)
    assert abs(score(3, 1) - score(3, 2)) > 1e-4


@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_rotary_turns_and_never_stretches(pairing):
    x = torch.randn(2, 3, T, D, dtype=torch.float64)
    turned = positions.rotary(x, pairing=pairing)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])  # position 0 is not turned
    assert not torch.allclose(turned[:, :, 1], x[:, :, 1])


def test_rotary_turns_each_pair_by_its_own_frequency():
    x = torch.zeros(T, 4, dtype=torch.float64)
    x[:, 0] = x[:, 1] = 1
    turned = positions.rotary(x)
    for p in range(T):
        assert turned[p].tolist() == pytest.approx([math.cos(p), math.cos(p / 100), math.sin(p), math.sin(p / 100)])


def test_odd_widths_and_unknown_pairings_are_refused():
    with pytest.raises(ConfigError, match="width must be even"):
        positions.sinusoidal(T, 5)
    with pytest.raises(ShapeError, match="even d"):
        positions.rotary(torch.zeros(T, 5))
    with pytest.raises(ConfigError, match="pairing"):
        positions.rotary(torch.zeros(T, 4), pairing="thirds")
