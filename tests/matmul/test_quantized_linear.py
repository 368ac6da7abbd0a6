"""A matrix in bytes: how far each number is off, and that both routes compute with the same numbers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within, gamma, sum_bound
from regard.compiled.threads import MOST_UNQUANTIZED
from regard.matmul import QuantizedLinear
from regard.matmul.float32_linear import LEAST, load_compiled_products
from regard.matmul.quantized_linear import LARGEST, ROWS
from skips import NEEDS_LOOPS


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def restored(matrix):
    """W in float64: each whole number times the scale of its row."""
    return matrix.values.double() * matrix.scales.double().unsqueeze(-1)


def exact(matrix, x):
    return F.linear(x.double(), restored(matrix), None if matrix.bias is None else matrix.bias.double())


def rounding(matrix, x, whole=False):
    """How far float32 may be off: n products, their scale and the bias.

    Whole numbers are summed exactly: five roundings make them, three turn a sum and two scales into a number, one adds a rest.
    """
    size = F.linear(x.double().abs(), restored(matrix).abs(), None if matrix.bias is None else matrix.bias.double().abs())
    return sum_bound(torch.float32, (9 if whole else x.shape[-1] + 1) + (matrix.bias is not None)) * size


def by_shorts(matrix, x):
    """Whether a product is one of whole numbers."""
    return load_compiled_products() is not None and len(x) > MOST_UNQUANTIZED and matrix.values.numel() >= LEAST


def off(matrix, x):
    """How far it may be from that of the numbers: each of a vector by half a step, all of them in the same direction."""
    return x.double().abs().amax(-1, keepdim=True) / matrix.most / 2 * restored(matrix).abs().sum(-1)


@given(st.integers(1, 50), st.integers(1, 50), st.floats(-6, 6), st.integers(0, 99))
def test_no_number_is_off_by_more_than_half_a_step(rows, n, size, seed):
    weight = numbers(rows, n, seed=seed) * 10**size
    weight[0] = 0
    matrix = QuantizedLinear.from_weight(weight)
    assert matrix.values.dtype == torch.int8
    assert matrix.values.abs().max() <= 127
    found = matrix.dequantize_rows(torch.arange(rows))
    half = matrix.scales.double().unsqueeze(-1) / 2
    allowed = half + gamma(torch.float32, 2) * (weight.double().abs() + half)  # a quotient and a product are rounded
    assert_within(found, weight, allowed)
    assert torch.equal(matrix.scales, weight.abs().amax(-1) / 127)


@pytest.mark.parametrize("rows", [7, ROWS + 13])
@pytest.mark.parametrize("count", [1, MOST_UNQUANTIZED, MOST_UNQUANTIZED + 1, 9])
@pytest.mark.parametrize("biased", [True, False])
def test_the_product_is_that_of_the_restored_matrix(rows, count, biased):
    bias = numbers(rows) if biased else None
    matrix, x = QuantizedLinear.from_weight(numbers(rows, 131), bias), numbers(count, 1, 131, seed=3)
    whole = by_shorts(matrix, x)
    assert_within(matrix(x), exact(matrix, x), rounding(matrix, x, whole) + (off(matrix, x) if whole else 0))
    assert_within(matrix(x.double()), exact(matrix, x), 1e-10)
    assert matrix(x.bfloat16()).dtype == torch.bfloat16


@NEEDS_LOOPS
@given(st.integers(1, 40), st.integers(1, 400), st.booleans(), st.floats(-3, 3), st.integers(0, 99))
def test_many_vectors_are_as_near_as_their_whole_numbers(count, n, biased, size, seed):
    rows = max(-(-LEAST // n), 200)
    matrix = QuantizedLinear.from_weight(numbers(rows, n, seed=seed) * 10**size, numbers(rows) if biased else None)
    x = numbers(count, n, seed=seed + 1)
    assert by_shorts(matrix, x) == (count > MOST_UNQUANTIZED)
    allowed = rounding(matrix, x, whole=count > MOST_UNQUANTIZED) + (off(matrix, x) if count > MOST_UNQUANTIZED else 0)
    assert_within(matrix(x), exact(matrix, x), allowed)


def test_no_sum_of_whole_numbers_can_overflow():
    assert QuantizedLinear.from_weight(numbers(9, 31)).most == LARGEST
    matrix = QuantizedLinear.from_weight(torch.ones(3, 4000))
    assert matrix.most < LARGEST
    assert 2**30 < 127 * 4000 * int(matrix.most) < 2**31


@NEEDS_LOOPS
def test_nan_and_infinities_spoil_their_vector_alone():
    matrix, x = QuantizedLinear.from_weight(numbers(521, 127)), numbers(5, 127)
    right = matrix(x)
    x[1, 5], x[3, 7] = torch.nan, torch.inf
    found = matrix(x)
    assert found[[1, 3]].isnan().all()
    assert torch.equal(found[[0, 2, 4]], right[[0, 2, 4]])


@NEEDS_LOOPS
def test_what_it_is_given_is_not_written_to():
    weight, bias = numbers(5, 3), numbers(5)
    before = weight.clone()
    matrix = QuantizedLinear.from_weight(weight, bias)
    bias.zero_()
    matrix(numbers(1, 3))
    assert torch.equal(weight, before)
    assert matrix.bias.abs().min() > 0


def test_it_is_saved_and_moved_with_its_model():
    matrix = QuantizedLinear.from_weight(numbers(5, 3), numbers(5))
    other = QuantizedLinear.from_weight(numbers(5, 3, seed=1), numbers(5, seed=2))
    other.load_state_dict(matrix.state_dict())
    assert torch.equal(other(numbers(2, 3)), matrix(numbers(2, 3)))


@pytest.mark.parametrize("count", [1, 5])
def test_scales_in_half_precision_are_read_as_they_are(count):
    matrix, x = QuantizedLinear.from_weight(numbers(521, 127), numbers(521)).bfloat16(), numbers(count, 127)
    assert_within(matrix(x), exact(matrix, x), rounding(matrix, x))
