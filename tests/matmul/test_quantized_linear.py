"""A matrix in fewer bits: how far each number is off, and that all routes compute with the same numbers."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from bounds import assert_within, gamma, sum_bound
from regard.compiled import threads
from regard.compiled.kernel_choice import count_least_restored_vectors, count_least_vectors_for_panels, has_bfloat16_products
from regard.compiled.matrix_formats import LARGEST, LARGEST_FOR_PANELS, LARGEST_RESTORED
from regard.errors import ConfigError, ShapeError
from regard.matmul import QuantizedLinear, round_for_product
from regard.matmul.float32_linear import LEAST, load_compiled_products
from regard.matmul.quantized_linear import MOST, MOST_EXACT, ROWS, WEIGHTS
from skips import NEEDS_BFLOAT16, NEEDS_LOOPS

INTEGERS = ("int8", "int4")


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dequantize(matrix):
    """W in float64."""
    return matrix.dequantize_rows(slice(None), torch.float64)


def exact(matrix, x):
    return F.linear(x.double(), dequantize(matrix), None if matrix.bias is None else matrix.bias.double())


def restores_rows(matrix, x):
    """Whether a compiled product restores rows of integers: to bfloat16, as it rounds vectors too, or int4 to integers."""
    if not matrix.can_run_compiled(x) or uses_panels(matrix, x) or matrix.values.is_floating_point():
        return False
    is_restored = matrix.values.dtype == torch.uint8 and 0 < count_least_restored_vectors() * matrix.columns <= x.numel()
    return matrix.uses_tiles(x) or is_restored


def uses_panels(matrix, x):
    """Whether a compiled product restores rows of integers to panels of integers."""
    least = count_least_vectors_for_panels()
    return matrix.can_run_compiled(x) and 0 < least * matrix.columns <= x.numel()


def rounding(matrix, x):
    """How far float32 may be off: n products, a scale of each number, the bias, and what is rounded to bfloat16."""
    size = F.linear(x.double().abs(), dequantize(matrix).abs(), None if matrix.bias is None else matrix.bias.double().abs())
    halves = 2 + (matrix.values.dtype != torch.bfloat16) if matrix.is_bfloat16_faster(x) else 0  # x, outputs, W unless exact
    halves = halves or 2 * (restores_rows(matrix, x) and has_bfloat16_products())
    halves = halves or (matrix.can_run_compiled(x) and (matrix.uses_tiles(x) or matrix.uses_pairs(x)))  # x alone: W is bfloat16
    is_float16_first = matrix.values.dtype == torch.int8 and matrix.can_run_compiled(x) and matrix.uses_tiles(x)
    half = gamma(torch.bfloat16, halves) + gamma(torch.float16, 2 * is_float16_first)
    return (sum_bound(torch.float32, x.shape[-1] + 8 + (matrix.bias is not None)) + half) * size


def uses_integers(matrix, x):
    """Whether a product is one of integers."""
    is_integer = not matrix.values.is_floating_point() and not matrix.is_bfloat16_faster(x)
    is_integer = is_integer and not (restores_rows(matrix, x) and has_bfloat16_products())
    return load_compiled_products() is not None and is_integer and len(matrix.values) * matrix.columns > MOST_EXACT


def activation_bounds(matrix, x):
    """How far it may be from that of the numbers: each of a vector by half a step, all of them in the same direction."""
    if not uses_integers(matrix, x):
        return 0
    size = x.double().abs()
    half = size.amax(-1, keepdim=True) / (LARGEST_FOR_PANELS if uses_panels(matrix, x) else LARGEST) / 2
    found = half * dequantize(matrix).abs().sum(-1)
    if not uses_panels(matrix, x) and not restores_rows(matrix, x):
        return found
    if matrix.values.dtype == torch.int8:  # then the numbers of a row are off as well
        largest = 127 * 255 * matrix.scales.double().abs()
    else:
        scale, offset = matrix.scales.double().abs().unbind(1)
        largest = (8 * scale + offset).amax(-1)
    return found + (size + half).sum(-1, keepdim=True) * largest / LARGEST_RESTORED / 2


@given(st.integers(1, 50), st.integers(1, 50) | st.sampled_from([768, 811]), st.floats(-6, 6), st.integers(0, 99))
def test_no_number_is_off_by_more_than_half_a_step_of_its_group(rows, n, size, seed):
    weight = numbers(rows, n, seed=seed) * 10**size
    weight[0] = 0
    matrix = QuantizedLinear.from_weight(weight)
    assert matrix.values.dtype == torch.int8
    assert matrix.values.abs().max() <= 127
    assert matrix.dequantize_rows(torch.arange(rows)).equal(matrix.dequantize_rows(slice(None)))
    found, exact = matrix.dequantize_rows(slice(None)), weight.double().abs()
    finest = exact.amax(-1, keepdim=True) / 127 / 255  # what the steps of a row are multiples of
    for first in range(0, n, 768):
        for pair in range(first, min(first + 32, n), 2):
            mine = [p + c for p in range(pair, min(first + 768, n), 32) for c in (0, 1) if p + c < n]
            half = (exact[:, mine].amax(-1, keepdim=True) / 127 + finest) / 2
            assert_within(found[:, mine], weight[:, mine], half + gamma(torch.float32, 6) * (exact[:, mine] + half))


@given(st.integers(1, 30), st.integers(1, 200), st.floats(-6, 6), st.integers(0, 99))
def test_numbers_of_4_bits_are_the_nearest_of_their_group(rows, n, size, seed):
    weight = numbers(rows, n, seed=seed) * 10**size
    weight[0] = 0
    matrix = QuantizedLinear.from_weight(weight, to="int4")
    found = matrix.dequantize_rows(torch.arange(rows))
    assert found.shape == weight.shape
    for group in range(0, n, 32):
        part, mine = weight[:, group : group + 32].double(), found[:, group : group + 32].double()
        part = torch.nn.functional.pad(part, (0, min(32, -n % 64)))[:, :32]  # a row is padded with zeros to whole blocks
        low, high = part.aminmax(dim=-1, keepdim=True)
        step = (high - low) / 15
        # half a step; scale and offset are bfloat16, off by 2⁻⁹: 15 scales, and an offset of at most |low| + 8 steps
        bound = (0.5 + 15 * 2.0**-9) * step + 2.0**-9 * (low.abs() + 8 * (1 + 2.0**-9) * step)
        assert_within(mine, part[:, : mine.shape[1]], bound * (1 + 2.0**-20))
    assert not found[0].any()


@pytest.mark.parametrize("to", WEIGHTS)
@pytest.mark.parametrize("rows", [7, ROWS + 13])
@pytest.mark.parametrize("count", [1, 2, MOST, MOST + 1, 512])
@pytest.mark.parametrize("biased", [True, False])
def test_the_product_is_that_of_the_restored_matrix(to, rows, count, biased):
    bias = numbers(rows) if biased else None
    matrix, x = QuantizedLinear.from_weight(numbers(rows, 131), bias, to), numbers(count, 1, 131, seed=3)
    assert_within(matrix(x), exact(matrix, x), rounding(matrix, x) + activation_bounds(matrix, x))
    assert_within(matrix(x.double()), exact(matrix, x), 1e-10)
    assert matrix(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("values", "scales", "group_scales"),
    [
        (torch.int8, torch.ones(5), torch.ones(5, 8, dtype=torch.uint8)),
        (torch.int8, torch.ones(5), torch.ones(5, 32)),
        (torch.int8, None, torch.ones(5, 32, dtype=torch.uint8)),
        (torch.bfloat16, None, torch.ones(5, 32, dtype=torch.uint8)),
    ],
)
def test_scales_of_groups_that_do_not_fit_are_refused(values, scales, group_scales):
    QuantizedLinear(torch.ones(5, 800, dtype=torch.int8), torch.ones(5), group_scales=torch.ones(5, 32, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="group_scales"):
        QuantizedLinear(torch.ones(5, 800, dtype=values), scales, group_scales=group_scales)


@NEEDS_LOOPS
@example("bfloat16", 20, 64, True, 0.0, 0)
@given(
    st.sampled_from(list(WEIGHTS)),
    st.integers(1, 40),
    st.integers(1, 400) | st.sampled_from([64, 832, 1543]),
    st.booleans(),
    st.floats(-3, 3),
    st.integers(0, 99),
)
def test_many_vectors_are_as_near_as_their_whole_numbers(to, count, n, biased, size, seed):
    rows = max(-(-LEAST // n), 200)
    matrix = QuantizedLinear.from_weight(numbers(rows, n, seed=seed) * 10**size, numbers(rows) if biased else None, to)
    x = numbers(count, n, seed=seed + 1)
    assert uses_integers(matrix, x) == (to in INTEGERS and not (restores_rows(matrix, x) and has_bfloat16_products()))
    assert matrix.can_run_compiled(x) == (to in INTEGERS or count <= MOST or matrix.uses_tiles(x) or matrix.uses_pairs(x))
    assert_within(matrix(x), exact(matrix, x), rounding(matrix, x) + activation_bounds(matrix, x))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [5, 16, 33, 63, 64])
@pytest.mark.parametrize("to", WEIGHTS)
def test_the_product_is_that_of_the_restored_matrix_by_any_number_of_threads(to, count, threads):
    """There are three blocks of rows, fewer than some of the numbers of threads. The vectors lie across in memory."""
    matrix, x = QuantizedLinear.from_weight(numbers(131, 832), numbers(131), to), numbers(832, count, seed=3).T
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = matrix(x)
    finally:
        torch.set_num_threads(before)
    assert_within(found, exact(matrix, x), rounding(matrix, x) + activation_bounds(matrix, x))


@NEEDS_LOOPS
@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize(("rows", "n"), [(129, 127), (1, 16411), (67, 769), (192, 192)])
@pytest.mark.parametrize("count", [1, 5, 41])
def test_products_of_more_integers_than_are_exact_are_compiled(to, rows, n, count):
    assert MOST_EXACT - 5 < rows * n < LEAST
    matrix, x = QuantizedLinear.from_weight(numbers(rows, n), numbers(rows), to), numbers(count, n, seed=3)
    assert matrix.can_run_compiled(x) == (rows * n > MOST_EXACT)
    assert_within(matrix(x), exact(matrix, x), rounding(matrix, x) + activation_bounds(matrix, x))


@pytest.mark.parametrize("count", [1, 33])
@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize(("rows", "n"), [(5, 3), (128, 128), (21, 779), (8, 1537)])
def test_products_of_few_integers_use_vectors_as_they_are(to, rows, n, count):
    matrix, x = QuantizedLinear.from_weight(numbers(rows, n), numbers(rows), to), numbers(count, n, seed=3)
    assert_within(matrix(x), exact(matrix, x), rounding(matrix, x))


@pytest.mark.parametrize("to", WEIGHTS)
@pytest.mark.parametrize(("rows", "n"), [(5, 3), (131, 521)])
def test_vectors_that_are_not_floating_or_of_another_width_are_refused(to, rows, n):
    matrix = QuantizedLinear.from_weight(numbers(rows, n), to=to)
    for kind in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(ConfigError, match=rf"the vectors must be of a floating dtype, got {kind}"):
            matrix(torch.ones(2, n, dtype=kind))
    for shape in ((2, n - 1), (2, n + 1), (n, 2), ()):
        with pytest.raises(ShapeError, match=rf"the vectors must be \(\.\.\., {n}\), as the rows of the matrix; got \("):
            matrix(torch.ones(shape))


@NEEDS_BFLOAT16
@pytest.mark.parametrize("to", [*INTEGERS, "bfloat16"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("restored", [2**22, 101 * 192])  # numbers restored at a time: all, and some rows
@pytest.mark.parametrize("vectors", [278, 93])  # multiplied at a time: all, and a third
def test_many_vectors_of_bfloat16_stay_bfloat16_and_are_rounded_as_often(to, biased, restored, vectors, monkeypatch):
    monkeypatch.setattr("regard.matmul.quantized_linear.MOST_RESTORED", restored)
    monkeypatch.setattr("regard.matmul.quantized_linear.count_vectors_at_a_time", lambda count, rows: vectors)
    matrix = QuantizedLinear.from_weight(numbers(523, 192), numbers(523) if biased else None, to)
    x = numbers(2, 139, 192, seed=3).bfloat16()
    assert_within(matrix(x), exact(matrix, x), rounding(matrix, x))
    assert matrix(x).dtype == torch.bfloat16
    assert torch.equal(matrix(x), matrix(x.float()).bfloat16())


@pytest.mark.parametrize("n", [80, 96, 100, 192, 257, 768])
@pytest.mark.parametrize("to", WEIGHTS)
def test_a_vector_that_is_no_number_leaves_the_outputs_of_the_others_finite(to, n):
    """Red where oneDNN multiplies by AMX what does not fill its tiles: 80, 100 and 257 columns."""
    matrix, x = QuantizedLinear.from_weight(numbers(1024, n), numbers(1024), to), numbers(139, n)
    for vector, column in ((0, 0), (16, 0), (32, 0), (77, n // 2), (138, n - 1)):
        hit = x.clone()
        hit[vector, column] = math.nan
        assert matrix(hit).isnan().any(-1).nonzero().flatten().tolist() == [vector], column


@pytest.mark.parametrize("to", INTEGERS)
@given(st.integers(1, 40), st.integers(1, 6) | st.just(25), st.floats(-6, 6), st.integers(0, 99))
def test_restored_numbers_are_those_of_float32_rounded_once(to, rows, blocks, size, seed):
    matrix = QuantizedLinear.from_weight(numbers(rows, 64 * blocks, seed=seed) * 10**size, to=to)
    expected = matrix.dequantize_rows(slice(None)).bfloat16()
    assert torch.equal(matrix.restore_as_bfloat16(slice(None)), expected)
    assert torch.equal(matrix.restore_as_bfloat16(slice(rows // 3, rows - 1)), expected[rows // 3 : rows - 1])


@pytest.mark.parametrize("n", [1, 32, 63, 64, 258])
@pytest.mark.parametrize("to", WEIGHTS)
def test_rows_for_onednn_are_contiguous(to, n):
    """Of a view, oneDNN's product takes 1,000 times as long."""
    matrix = QuantizedLinear.from_weight(numbers(9, n), to=to)
    assert matrix.restore_as_bfloat16(slice(None)).is_contiguous()
    assert matrix.restore_as_bfloat16(slice(2, 5)).is_contiguous()


@pytest.mark.parametrize("to", WEIGHTS)
def test_compiled_products_read_no_weights_on_another_device(to, monkeypatch):
    """They would read addresses of the other device."""
    monkeypatch.setattr("regard.matmul.quantized_linear.is_bfloat16_product_faster", lambda columns: True)
    matrix, few, many = QuantizedLinear.from_weight(numbers(523, 192), to=to), numbers(3, 192), numbers(139, 192)
    assert matrix.is_bfloat16_faster(many) == (to != "float16")
    assert matrix.can_run_compiled(few) == bool(threads.can_run_loops() and threads.find_barrier_address())
    for name, own in dict(matrix.named_buffers()).items():
        setattr(matrix, name, own.to("meta"))
        assert round_for_product(many, matrix) is many, name
        assert not matrix.can_run_compiled(few), name
        setattr(matrix, name, own)


@NEEDS_LOOPS
@pytest.mark.parametrize("count", [7, 12, 40, 100])
def test_vectors_of_float16_are_not_rounded_to_bfloat16(count):
    matrix, x = QuantizedLinear.from_weight(numbers(523, 192), to="bfloat16"), numbers(count, 192).half()
    sizes = F.linear(x.double().abs(), dequantize(matrix).abs())
    assert ((matrix(x) - exact(matrix, x)).abs() <= gamma(torch.float16, 1) * sizes + 2.0**-24).all()


@NEEDS_LOOPS
@pytest.mark.parametrize("to", WEIGHTS)
@pytest.mark.parametrize("count", [5, 33, 512])
def test_nan_and_infinities_spoil_their_vector_alone(to, count):
    matrix, x = QuantizedLinear.from_weight(numbers(521, 127), to=to), numbers(count, 127)
    right = matrix(x)
    x[1, 5], x[3, 7] = torch.nan, torch.inf
    found = matrix(x)
    assert not found[[1, 3]].isfinite().any()
    assert torch.equal(found[[0, 2, 4]], right[[0, 2, 4]])


@pytest.mark.parametrize("to", WEIGHTS)
def test_it_is_saved_and_moved_with_its_model(to):
    matrix = QuantizedLinear.from_weight(numbers(5, 3), numbers(5), to)
    other = QuantizedLinear.from_weight(numbers(5, 3, seed=1), numbers(5, seed=2), to)
    other.load_state_dict(matrix.state_dict())
    assert torch.equal(other(numbers(2, 3)), matrix(numbers(2, 3)))


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("to", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_matrix_that_was_cast_is_read_as_it_is(count, to, dtype):
    matrix, x = QuantizedLinear.from_weight(numbers(521, 127), numbers(521), to).to(dtype), numbers(count, 127)
    assert_within(matrix(x), exact(matrix, x), rounding(matrix, x) + activation_bounds(matrix, x))


@pytest.mark.parametrize("to", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "rows"), [(1, 7), (1, 521), (5, 521), (139, 521)])
def test_a_layer_of_16_bits_gives_vectors_of_its_dtype_rounded_a_few_times(count, rows, dtype, to):
    weight, bias, x = (one.to(dtype) for one in (numbers(rows, 127), numbers(rows), numbers(count, 127, seed=3)))
    matrix = QuantizedLinear.from_weight(weight, bias, to)
    found, size = matrix(x), F.linear(x.double().abs(), dequantize(matrix).abs(), bias.double().abs())
    assert found.dtype == dtype
    allowed = rounding(matrix, x.float()) + activation_bounds(matrix, x.float()) + gamma(dtype, 3) * size  # W, product, bias
    assert_within(found, exact(matrix, x), allowed)


@NEEDS_LOOPS
@pytest.mark.parametrize("to", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_vector_of_16_bits_is_that_of_float32_rounded_once(dtype, to):
    matrix = QuantizedLinear.from_weight(numbers(521, 127).to(dtype), numbers(521).to(dtype), to)
    x = numbers(1, 127, seed=3).to(dtype)
    assert matrix.can_run_compiled(x.float())
    assert torch.equal(matrix(x), matrix(x.float()).to(dtype))


@pytest.mark.parametrize("n", [127, 1536])
def test_a_weight_that_lies_across_in_memory_is_read_in_order(n):
    weight = numbers(n, 521).T
    for to in WEIGHTS:
        found, x = QuantizedLinear.from_weight(weight, to=to), numbers(1, n)
        assert torch.equal(found(x), QuantizedLinear.from_weight(weight.contiguous(), to=to)(x))


@pytest.mark.parametrize("to", WEIGHTS)
def test_its_weight_is_that_of_the_numbers_left_in_the_dtype_it_had(to, monkeypatch):
    matrix = QuantizedLinear.from_weight(numbers(7, 67).bfloat16(), to=to)
    weight, x = matrix.weight, numbers(3, 67)
    assert torch.equal(weight.double(), matrix.dequantize_rows(slice(None), torch.bfloat16).double())
    assert torch.equal(F.linear(x, matrix.to(torch.float32).weight), F.linear(x, matrix.dequantize_rows(slice(None))))
    assert "like" not in matrix.state_dict()
    assert torch.equal(torch.ones(7, 67).add_(weight), 1 + matrix.dequantize_rows(slice(None), torch.bfloat16).float())
    assert torch.equal(weight[2:].T.contiguous(), matrix.dequantize_rows(slice(2, None), torch.bfloat16).T)
    assert torch.equal(torch.stack(weight.unbind()), torch.stack(list(weight)))
    assert torch.equal(copy.deepcopy({"a part": weight})["a part"].float(), weight.float())
    monkeypatch.setattr(QuantizedLinear, "dequantize_rows", None)  # what is asked from here on reads no number
    assert (matrix.weight.shape, matrix.weight.dtype, matrix.weight.device) == ((7, 67), torch.float32, x.device)


WRITES = {
    "zero_": lambda weight: weight.zero_(),
    "entry": lambda weight: weight.__setitem__(0, 0),
    "part": lambda weight: weight[:, 3].fill_(0),
    "data": lambda weight: weight.data.mul_(0),
    "data entry": lambda weight: weight.data.__setitem__((slice(None), 3), 0),
    "transpose": lambda weight: weight.T.copy_(torch.zeros(67, 7)),
    "out": lambda weight: torch.zeros(7, 67, out=weight),
    "several": lambda weight: torch._foreach_mul_([weight], 0.0),
}


@torch.no_grad()
@pytest.mark.parametrize("write", WRITES)
def test_its_weight_and_views_of_it_refuse_to_be_changed(write):
    matrix = QuantizedLinear.from_weight(numbers(7, 67))
    with pytest.raises(ConfigError, match="quantise it again"):
        WRITES[write](matrix.weight)
