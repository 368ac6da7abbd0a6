import math

import pytest
import torch

from regard.lectures.comparison import FieldComparison

INF = math.inf


@pytest.mark.parametrize(
    ("printed", "computed", "difference"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 3.125], 0.5),
        ([1.0, -INF], [1.25, -INF], 0.25),
        ([1.0, 0.0], [1.0, -INF], INF),
        ([1.0, -INF], [1.0, INF], INF),
        ([1.0], [1.0, 1.0], INF),
        ([[1.0]], [1.0], INF),
    ],
)
def test_the_difference_is_the_largest_distance_of_two_numbers(printed, computed, difference):
    assert FieldComparison("", torch.tensor(printed), torch.tensor(computed)).difference == difference


def test_a_nan_on_either_side_is_a_difference_that_no_tolerance_admits():
    number, broken = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])
    for printed, computed in ((number, broken), (broken, number), (broken, broken)):
        assert math.isnan(FieldComparison("", printed, computed).difference)


def test_whole_numbers_are_compared_with_real_ones():
    assert FieldComparison("", torch.tensor([2.0, 6.0]), torch.tensor([2, 5])).difference == 1
