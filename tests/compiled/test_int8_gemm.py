"""Bytes meet 16 bits in whole numbers, exactly; a vector's whole numbers are the nearest that there are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

numba = pytest.importorskip("numba", reason="the loops need numba, which is not installed")

from bounds import gamma  # noqa: E402
from regard.compiled import int8_gemm  # noqa: E402
from regard.compiled.int8_gemm import VECTORS, multiply_int8_rows, quantize_vector  # noqa: E402


def product(x, matrix, factors, scales, first, last, multiply=multiply_int8_rows):
    """What is written where, beside what was there."""
    padded = np.zeros((-(-len(x) // VECTORS) * VECTORS, x.shape[1]), np.int16)
    padded[: len(x)] = x
    out = np.full((len(x), len(matrix)), 7, np.float32)
    multiply(padded, factors, first, last, matrix, scales, np.zeros(0, np.float32), out)
    return out


def expected(x, matrix, factors, scales, first, last):
    out = np.full((len(x), len(matrix)), 7, np.float64)
    whole = x.astype(np.int64) @ matrix.astype(np.int64).T
    out[:, first:last] = (whole * np.outer(factors.astype(np.float64), scales))[:, first:last]
    return out


def random(count, rows, columns, seed):
    dice = np.random.default_rng(seed)
    x, matrix = dice.integers(-9000, 9001, (count, columns)), dice.integers(-127, 128, (rows, columns))
    return x.astype(np.int16), matrix.astype(np.int8), *(dice.normal(size=n).astype(np.float32) for n in (count, rows))


PLACES = st.integers(0, 23)


@given(st.integers(1, 70), st.integers(1, 23), st.integers(1, 300) | st.just(128), PLACES, PLACES, st.integers(0, 99))
def test_the_sums_are_those_of_whole_numbers_and_nothing_beside_them_is_touched(count, rows, columns, a, b, seed):
    first, last = sorted((min(a, rows), min(b, rows)))
    x, matrix, factors, scales = random(count, rows, columns, seed)
    found = product(x, matrix, factors, scales, first, last)
    sizes = expected(np.abs(x.astype(int)), np.abs(matrix.astype(int)), np.abs(factors), np.abs(scales), first, last)
    exact = expected(x, matrix, factors, scales, first, last)
    # a sum becomes a float32, the two factors meet, and their product meets it; so does that of a rest, which is added
    assert (np.abs(found - exact) <= gamma(torch.float32, 4) * sizes).all()
    if not columns % int8_gemm.INT16_COUNT:
        np.testing.assert_allclose(found, exact, rtol=gamma(torch.float32, 3))


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("columns", [64, 515])
def test_they_are_the_same_where_the_processor_does_not_add_pairs(columns, monkeypatch):
    given = *random(6, 9, columns, 0), 1, 9
    monkeypatch.setattr(int8_gemm, "PAIRWISE", None)
    found = product(*given, multiply=numba.njit(multiply_int8_rows.py_func))
    np.testing.assert_array_equal(found, product(*given))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(sign):
    columns, most = 768, (2**31 - 1) // (127 * 768)
    x, matrix = np.full((5, columns), sign * most, np.int16), np.full((9, columns), 127, np.int8)
    found = product(x, matrix, np.ones(5, np.float32), np.ones(9, np.float32), 0, 9)
    assert (found == np.float32(sign * most * 127 * columns)).all()


@given(
    st.lists(st.floats(-1e6, 1e6, width=32) | st.floats(-(2.0**-96), 2.0**-96, width=32), min_size=1, max_size=70),
    st.integers(1, 32767),
)
def test_whole_numbers_are_the_nearest_and_reach_the_largest(numbers, most):
    x, out = np.array(numbers, np.float32), np.full(len(numbers), 7, np.int16)
    scale = quantize_vector(x, most, out)
    assert (scale > 0) == (np.abs(x).max() > 1e-30)
    assert np.abs(out).max() == (most if scale > 0 else 0)
    # half a whole number, and five roundings: of two divisions, which may be by the reciprocal, and of a product
    allowed = 0.5 * np.float64(scale) + gamma(torch.float32, 5) * np.abs(x).astype(np.float64)
    assert (np.abs(out * np.float64(scale) - x) <= (allowed if scale > 0 else int8_gemm.LOW)).all()


@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_has_no_scale(lost):
    x, out = np.ones(40, np.float32), np.full(40, 7, np.int16)
    x[17] = lost
    assert np.isnan(quantize_vector(x, 1000, out))
    assert (np.abs(out) <= 1000).all()


def test_zeros_are_zeros():
    out = np.full(40, 7, np.int16)
    assert quantize_vector(np.zeros(40, np.float32), 1000, out) == 0
    assert not out.any()
