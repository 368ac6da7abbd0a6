"""Numbers are written alike whatever the last bits of float32 are, which differ from processor to processor."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.show.number_format import format_aligned, format_number, format_rounded

ULPS = (-3, -1, 0, 1, 3)  # that a short sum may be off by


def list_neighbors(value: float) -> list[float]:
    """A number in float32, and what other processors may give in its place."""
    own = np.float32(value)
    return [float(own + ulps * np.spacing(own)) for ulps in ULPS]


@given(st.integers(1, 99_999))
def test_a_half_of_the_last_place_is_rounded_alike_on_every_processor_and_away_from_0(number):
    half = (number + 0.5) / 1e4
    expected = f"{(number + 1) / 1e4:.4f}".rstrip("0").rstrip(".")
    assert {format_number(one) for one in list_neighbors(half)} == {expected}
    assert {format_number(one) for one in list_neighbors(-half)} == {f"-{expected}"}
    assert {format_rounded(one) for one in list_neighbors((number % 999 + 10.5) / 1e2)} == {f"{(number % 999 + 11) / 1e2:.2f}"}


@pytest.mark.parametrize("threshold", [1e-3, 1e6, 1e-4, 0.095, 1e3])
def test_what_stands_at_the_edge_of_a_format_is_written_alike(threshold):
    for write in (format_number, format_rounded, lambda one: format_aligned([one])[0]):
        assert len({write(one) for one in list_neighbors(threshold)}) == 1


@pytest.mark.parametrize(
    ("numbers", "written"),
    [
        ([1.0, 2.0], ["1", "2"]),
        ([0.43, 0.15], ["0.43", "0.15"]),
        ([0.43, 0.12345], ["0.4300", "0.1235"]),
        ([0.99996, 0.00004, 0.0], ["1.0000", "0.0000", "0"]),
        ([-0.00001, 1.5], ["0.0000", "1.5000"]),
        ([1e-5, 2e-4], ["1.000e-05", "2.000e-04"]),
        ([1234.567, 1.0], ["1234.57", "1.00"]),
        ([math.inf, 0.5], ["inf", "0.5"]),
    ],
)
def test_the_numbers_of_a_table_have_the_places_that_they_need(numbers, written):
    assert format_aligned(numbers) == written
