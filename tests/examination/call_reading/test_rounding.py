"""Tensors are equal up to rounding by the largest of the expected numbers."""

import pytest
import torch

from regard.examination.call_reading.rounding import NEAR, is_near


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_the_largest_expected_number_is_the_measure(size):
    expected = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * size
    step = torch.zeros_like(expected)
    step[1, 2] = NEAR * float(expected.abs().max())
    assert is_near(expected, expected)
    assert is_near(expected + 0.99 * step, expected)
    assert not is_near(expected + 1.01 * step, expected)


def test_zeros_are_near_zeros_alone():
    zeros = torch.zeros(2, 3)
    assert is_near(zeros, zeros)
    assert not is_near(zeros + 1e-9, zeros)


def test_other_shapes_and_nan_are_not_near_and_tensors_without_numbers_are():
    x = torch.ones(2, 3)
    assert not is_near(x, x[:1])
    assert not is_near(x * torch.nan, x)
    assert is_near(x[:, :0], x[:, :0])
