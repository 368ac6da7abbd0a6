"""The sums of rows and vectors in each format are those of the numbers that it stands for; nothing else is touched."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

numba = pytest.importorskip("numba", reason="the loops need numba, which is not installed")

from bounds import gamma, unit_roundoff  # noqa: E402
from regard.compiled import matrix_formats  # noqa: E402
from regard.compiled.kernel_choice import has_lookup_of_16_bits  # noqa: E402
from regard.compiled.matrix_formats import (  # noqa: E402
    BLOCK,
    DTYPES,
    GROUP,
    LARGEST,
    LARGEST_FOR_PANELS,
    LARGEST_RESTORED,
    count_shorts,
    describe_matrix,
    pad_columns,
)
from regard.compiled.register_tiles import LANES, MULTIPLIES_PAIRS  # noqa: E402
from regard.matmul import amx_intrinsics, numba_amx, numba_int16_panels, numba_quantized, numba_row_tiles  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.emulated]  # kernels are compiled for them that nothing else uses

HALVES, INTEGERS = (torch.bfloat16, torch.float16), (torch.int8, torch.uint8)
INLINED = "is_restored", "is_rounded", "multiply_matrix", "quantize_for", "quantize_vector", "round_vector", "sum_groups"
is_restored, is_rounded, multiply_matrix, quantize_for, quantize_vector, round_vector, sum_groups = (
    numba.njit(getattr(numba_quantized, name).py_func) for name in INLINED
)
uses_pairs = numba.njit(numba_quantized.uses_pairs.py_func)
uses_tiles = numba.njit(numba_amx.uses_tiles.py_func)


multiply_panels, quantize_for_panels = (
    numba.njit(getattr(numba_int16_panels, name).py_func) for name in ("multiply_panels", "quantize_for_panels")
)
LEAST = {torch.bfloat16: 6, torch.int8: 10, torch.uint8: 7}  # vectors that are multiplied by tiles
TILED = tuple(LEAST)
NEEDS_TILES = pytest.mark.skipif(not numba_amx.HAS_TILES, reason="this processor multiplies no tiles of bfloat16 (AMX)")
NEEDS_PANELS = pytest.mark.skipif(not has_lookup_of_16_bits(), reason="panels need registers of 32 numbers of 16 bits")


def draw_matrix(dtype, rows, columns, dice):
    """A matrix in a format; and in float64 its numbers, read one by one, and the largest sizes of what each is the sum of."""
    bias = torch.randn(rows, generator=dice) if columns % 2 else None
    if dtype not in INTEGERS:
        numbers = torch.randn(rows, columns, generator=dice).to(dtype)
        return [numbers, None, bias, None], numbers.double().numpy(), numbers.double().abs().numpy()
    if dtype == torch.int8:
        numbers = torch.randint(-127, 128, (rows, columns), generator=dice, dtype=torch.int8)
        scales = torch.randn(rows, generator=dice)
        groups = torch.randint(0, 256, (rows, -(-columns // 768) * 16), generator=dice, dtype=torch.uint8)
        exact = torch.empty(rows, columns, dtype=torch.float64)
        for p in range(columns):
            exact[:, p] = numbers[:, p].double() * scales.double() * groups[:, p // 768 * 16 + p % 32 // 2].double()
        return [numbers, scales, bias, groups], exact.numpy(), exact.abs().numpy()
    padded = -(-columns // BLOCK) * BLOCK
    stored = torch.randint(0, 256, (rows, padded // 2), generator=dice, dtype=torch.uint8)
    scales = torch.randn(rows, 2, padded // GROUP, generator=dice).bfloat16()
    numbers = np.empty((rows, padded))
    for p in range(padded):
        byte = stored[:, p // BLOCK * (BLOCK // 2) + p % GROUP].int()
        half = byte >> 4 if p % BLOCK >= GROUP else byte & 15
        numbers[:, p] = torch.where(half < 8, half, half - 16)
    scale, offset = scales.double().repeat_interleave(GROUP, -1).numpy()[..., :columns].transpose(1, 0, 2)
    numbers = numbers[:, :columns] * scale
    return [stored, scales, bias, None], numbers + offset, np.abs(numbers) + np.abs(offset)


def find_steps(scales):
    """By how much neighbors differ among the integers that rows of int4 are restored to."""
    scale, offset = scales.double().abs().unbind(1)
    return (8 * scale + offset).amax(-1) / matrix_formats.LARGEST_RESTORED


def multiply(parts, x, first, last, run=multiply_matrix):
    """What is written where, beside what was there; and the vectors that a matrix of fewer bits meets, in float64."""
    rows, (count, columns) = len(parts[0]), x.shape
    of = np.array(describe_matrix(parts), np.int64)
    integers, factors = np.full((count, count_shorts(columns)), 7, np.int16), np.full(count, 7, np.float32)
    met = x.astype(np.float64)
    if is_rounded(of, columns, count):
        for one in range(count):
            quantize_for(of, x, one, integers, factors)
    if uses_tiles(of, columns, count) or uses_pairs(of, count) or (is_restored(of, count) and MULTIPLIES_PAIRS):
        met = torch.from_numpy(x).bfloat16().double().numpy()
    elif parts[0].dtype in INTEGERS:
        met = integers[:, :columns].astype(np.float64) * factors[:, None].astype(np.float64)
    out = np.full((count, rows), 7, np.float32)
    run(of, x, integers, factors, first, last, out)
    return out, met


def assert_is_product(dtype, count, rows, columns, first, last, seed=0, run=multiply_matrix):
    dice = torch.Generator().manual_seed(seed)
    parts, numbers, largest = draw_matrix(dtype, rows, columns, dice)
    found, met = multiply(parts, torch.randn(count, columns, generator=dice).numpy(), first, last, run)
    bias = 0 if parts[2] is None else parts[2].double().numpy()
    expected, sizes = np.full((2, count, rows), 7.0)
    expected[:, first:last] = (met @ numbers.T + bias)[:, first:last]
    sizes[:, first:last] = (np.abs(met) @ largest.T + np.abs(bias))[:, first:last]
    # int8 is summed exactly in a lane of a span: a float32, times the scale of its group; then all spans and lanes are added
    added = -(-columns // 768) * (16 // LANES) + math.log2(LANES)
    terms = 5 + (added if dtype == torch.int8 else columns)  # two scales meet, then both, then the bias
    of, rounding = np.array(describe_matrix(parts)), np.zeros_like(sizes)  # of the rows
    restores = is_restored(of, count)
    if dtype in INTEGERS and (uses_tiles(of, columns, count) or (restores and MULTIPLIES_PAIRS)):
        # the products of int8 and its scales are float16 first
        twice = unit_roundoff(torch.float16) if dtype == torch.int8 else 0
        rounding = (unit_roundoff(torch.bfloat16) + 2 * twice) * sizes
    elif restores:
        steps = find_steps(parts[1]).numpy()[first:last]
        rounding[:, first:last] = np.abs(met).sum(1, keepdims=True) * steps / 2
    assert (np.abs(found - expected) <= gamma(torch.float32, terms) * (sizes + rounding) + rounding).all()


PLACES = st.integers(0, 23)


def multiply_by_panels(parts, x, first, last):
    """What is written where, beside what was there; and the vectors of integers that meet the matrix, in float64."""
    rows, (count, columns) = len(parts[0]), x.shape
    integers, factors = np.full((count, count_shorts(columns)), 7, np.int16), np.full(count, 7, np.float32)
    for one in range(count):
        factors[one] = quantize_for_panels(x[one], one, count, integers)
    out = np.full((count, rows), 7, np.float32)
    multiply_panels(np.array(describe_matrix(parts), np.int64), columns, integers, factors, first, last, out)
    padded, stored = pad_columns(columns), integers.ravel()
    starts = range(0, padded, numba_int16_panels.COLUMNS)
    places = [(count * c, min(numba_int16_panels.COLUMNS, padded - c)) for c in starts]
    met = np.concatenate([stored[at : at + count * n].reshape(count, n) for at, n in places], 1)
    assert not met[:, columns:].any()
    return out, met[:, :columns] * factors[:, None].astype(np.float64)


def find_panel_steps(parts):
    """By how much neighbors differ among the integers that rows are restored to, in float64."""
    if parts[0].dtype == torch.uint8:
        return find_steps(parts[1]).numpy()
    return (parts[1].double().abs() * (2**15 / round(LARGEST_RESTORED * 2**15 / (127 * 255)))).numpy()


@NEEDS_PANELS
@example(torch.int8, 521, 60, 1543, 0, 60, 0)
@example(torch.uint8, 9, 259, 1543, 3, 259, 0)
@given(
    st.sampled_from(INTEGERS),
    st.integers(1, 70),
    st.integers(1, 230),
    st.integers(1, 500) | st.sampled_from([192, 768, 1543]),
    st.integers(0, 230),
    st.integers(0, 230),
    st.integers(0, 99),
)
def test_panels_have_the_sums_of_the_numbers_and_touch_nothing_beside_them(dtype, count, rows, columns, a, b, seed):
    first, last = sorted((min(a, rows), min(b, rows)))
    dice = torch.Generator().manual_seed(seed)
    parts, numbers, largest = draw_matrix(dtype, rows, columns, dice)
    x = torch.randn(count, columns, generator=dice).numpy()
    found, met = multiply_by_panels(parts, x, first, last)
    half = np.abs(x).max(1, keepdims=True) / LARGEST_FOR_PANELS / 2
    assert (np.abs(met - x) <= half + gamma(torch.float32, 5) * np.abs(x)).all()
    bias = 0 if parts[2] is None else parts[2].double().numpy()
    expected, sizes, rounding = np.full((3, count, rows), 7.0)
    expected[:, first:last] = (met @ numbers.T + bias)[:, first:last]
    sizes[:, first:last] = (np.abs(met) @ largest.T + np.abs(bias))[:, first:last]
    rounding[:, first:last] = np.abs(met).sum(1, keepdims=True) * find_panel_steps(parts)[first:last] / 2
    rounding[:, :first] = rounding[:, last:] = sizes[:, :first] = sizes[:, last:] = 0
    # the sum of a panel becomes float32 and is added to those before; three scales and a bias follow. The integers of int4 are
    # those of numbers that are computed in float32: scale and offset times a factor, a product and a sum
    terms = 6 + -(-columns // numba_int16_panels.COLUMNS) + 5
    assert (np.abs(found - expected) <= gamma(torch.float32, terms) * (sizes + rounding) + rounding).all()


@NEEDS_PANELS
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_largest_sums_of_panels_do_not_overflow(dtype, sign):
    """All numbers are the largest that a format has: 127 times 255 in int8, -8 in int4."""
    rows, columns = 49, 1536
    parts = [torch.full((rows, columns), 127, dtype=torch.int8), torch.ones(rows), None]
    parts.append(torch.full((rows, 32), 255, dtype=torch.uint8))
    if dtype == torch.uint8:
        scales = torch.zeros(rows, 2, columns // GROUP, dtype=torch.bfloat16)
        scales[:, 0] = 1
        parts = [torch.full((rows, columns // 2), 0x88, dtype=torch.uint8), scales, None, None]
    found, met = multiply_by_panels(parts, np.full((9, columns), sign, np.float32), 0, rows)
    expected = (-8 if dtype == torch.uint8 else 127 * 255) * met.sum(1)[:, None].repeat(rows, 1)
    step = find_panel_steps(parts)[0] / 2 * np.abs(met).sum(1)[0] / np.abs(expected[0, 0])
    np.testing.assert_allclose(found, expected, rtol=gamma(torch.float32, 16) + step)


@NEEDS_PANELS
@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", [0, 1])  # a scale, an offset
def test_panels_keep_to_their_row_and_vector_what_is_not_finite(lost, part):
    parts, _, _ = draw_matrix(torch.uint8, 9, 256, torch.Generator().manual_seed(0))
    parts[1][3, part, 5] = lost
    x = np.ones((16, 256), np.float32)
    x[5, 7] = lost
    found, _ = multiply_by_panels(parts, x, 0, 9)
    assert not np.isfinite(found[:, 3]).any()
    assert not np.isfinite(found[5]).any()
    assert np.isfinite(np.delete(np.delete(found, 3, 1), 5, 0)).all()


@NEEDS_PANELS
def test_a_vector_has_the_same_sums_by_panels_beside_any_others():
    dice = torch.Generator().manual_seed(0)
    for dtype in INTEGERS:
        parts, _, _ = draw_matrix(dtype, 100, 259, dice)
        x = torch.randn(531, 259, generator=dice).numpy()
        whole, _ = multiply_by_panels(parts, x, 0, 100)
        for one in (0, 8, 511, 512, 530):
            np.testing.assert_array_equal(multiply_by_panels(parts, x[one : one + 1], 0, 100)[0][0], whole[one])
            np.testing.assert_array_equal(multiply_by_panels(parts, x[one : one + 1], 50, 51)[0][0, 50], whole[one, 50])


@NEEDS_TILES
@example(torch.bfloat16, 39, 83, 1600, 0, 83, 0)
@example(torch.int8, 39, 83, 1600, 0, 83, 0)
@example(torch.uint8, 39, 83, 1600, 0, 83, 0)
@given(
    st.sampled_from(TILED),
    st.integers(6, 70),
    st.integers(1, 80),
    st.sampled_from([64, 128, 576, 768, 832]),
    st.integers(0, 80),
    st.integers(0, 80),
    st.integers(0, 99),
)
def test_tiles_have_the_sums_of_the_numbers_and_touch_nothing_beside_them(dtype, count, rows, columns, a, b, seed):
    parts, _, _ = draw_matrix(dtype, rows, columns, torch.Generator())
    assert uses_tiles(np.array(describe_matrix(parts)), columns, count) == (count >= LEAST[dtype])
    assert_is_product(dtype, count, rows, columns, *sorted((min(a, rows), min(b, rows))), seed)


@NEEDS_TILES
@pytest.mark.parametrize("dtype", TILED)
def test_a_vector_has_the_same_sums_by_tiles_beside_any_others(dtype):
    dice = torch.Generator().manual_seed(0)
    parts, _, _ = draw_matrix(dtype, 101, 320, dice)
    x = torch.randn(70, 320, generator=dice).numpy()
    whole, _ = multiply(parts, x, 0, 101)
    for count in (LEAST[dtype], 20, 33):
        np.testing.assert_array_equal(multiply(parts, x[:count], 0, 101)[0], whole[:count])
        np.testing.assert_array_equal(multiply(parts, x[-count:], 50, 51)[0][:, 50], whole[-count:, 50])


@NEEDS_TILES
@example(torch.int8, 32, 83, 832, 0, 83, 0)
@example(torch.uint8, 16, 83, 832, 0, 83, 0)
@example(torch.int8, 16, 83, 1600, 0, 83, 0)
@given(
    st.sampled_from(INTEGERS),
    st.integers(16, 32),
    st.integers(1, 83),
    st.sampled_from([64, 128, 576, 768, 832]),
    st.integers(0, 83),
    st.integers(0, 83),
    st.integers(0, 99),
)
def test_rows_restored_beside_products_have_the_sums_of_rows_restored_first(dtype, count, rows, columns, a, b, seed):
    """Rows are restored first for more than 32 vectors."""
    dice = torch.Generator().manual_seed(seed)
    parts, _, _ = draw_matrix(dtype, rows, columns, dice)
    x, (first, last) = torch.randn(33, columns, generator=dice).numpy(), sorted((min(a, rows), min(b, rows)))
    expected, _ = multiply(parts, x, first, last)
    np.testing.assert_array_equal(multiply(parts, x[:count], first, last)[0], expected[:count])


@NEEDS_TILES
@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", TILED)
def test_tiles_keep_to_their_row_and_vector_what_is_not_finite(dtype, lost):
    parts, _, _ = draw_matrix(dtype, 40, 256, torch.Generator().manual_seed(0))
    numbers = parts[0] if dtype == torch.bfloat16 else parts[1].view(40, -1)
    x = np.ones((35, 256), np.float32)
    numbers[3, -1], numbers[17, -1], x[5, 7], x[34, 255] = lost, lost, lost, lost
    found, _ = multiply(parts, x, 0, 40)
    assert not np.isfinite(found[:, [3, 17]]).any()
    assert not np.isfinite(found[[5, 34]]).any()
    assert np.isfinite(np.delete(np.delete(found, [3, 17], 1), [5, 34], 0)).all()


@NEEDS_TILES
def test_tiles_restore_each_product_of_int8_to_the_nearest_number_of_bfloat16():
    """Each integer times each scale, alone in its sum. A product is rounded to float16 first."""
    numbers, groups = torch.arange(-128, 128, dtype=torch.int8).repeat(256, 1), torch.arange(256, dtype=torch.uint8)
    parts = [numbers, torch.ones(256), None, groups[:, None].repeat(1, 16)]
    found, _ = multiply(parts, np.eye(256, dtype=np.float32), 0, 256)
    exact = numbers[0].double()[:, None] * groups.double()
    assert np.array_equal(found, torch.from_numpy(found).bfloat16().float().numpy())
    allowed = (unit_roundoff(torch.bfloat16) + 2 * unit_roundoff(torch.float16)) * exact.abs()
    assert (np.abs(found - exact.numpy()) <= allowed.numpy()).all()


SIZES = [1e-34, 1e-20, 1e-10, 1, 1e10, 1e20, 1e30]
MULTIPLIABLE = [
    (torch.int8, 1e-10, 1e34),
    *((dtype, a, b) for dtype in TILED for a in [*SIZES, 1e36] for b in SIZES if 1e-30 < a * b < 1e35),
]  # whose sums are finite in float32


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize(("dtype", "of_vectors", "of_matrix"), MULTIPLIABLE)
def test_nothing_is_lost_of_vectors_and_matrices_that_are_small_or_large(dtype, of_vectors, of_matrix, count):
    """Red if int8, which tiles restore over 2**112, meets such vectors as they are, or its sums first the larger scale."""
    of_vectors = max(of_vectors, 0 if uses_tiles(np.array([0, 0, 0, 0, DTYPES[dtype]]), 256, count) else 1e-20)
    dice = torch.Generator().manual_seed(0)
    parts, _, _ = draw_matrix(dtype, 40, 256, dice)
    if dtype == torch.int8:
        parts[1] /= 255 * 127  # so that the numbers of the matrix are about 1
    x = torch.randn(count, 256, generator=dice).bfloat16().float().numpy()
    power, other = (2.0 ** round(math.log2(size)) for size in (of_vectors, of_matrix))
    expected, _ = multiply(parts, x, 0, 40)
    scaled = 0 if dtype == torch.bfloat16 else 1
    parts[scaled] = parts[scaled] * other
    found, _ = multiply(parts, x * np.float32(power), 0, 40)
    np.testing.assert_allclose(found / power / other, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@NEEDS_TILES
def test_the_tile_registers_of_a_thread_stay_configured_as_they_were():
    """Other libraries, which configure them once, are called by the same threads."""
    of_config = numba.njit(configure_and_multiply)
    parts, _, _ = draw_matrix(torch.bfloat16, 40, 64, torch.Generator().manual_seed(0))
    x, out = np.ones((10, 64), np.float32), np.empty((10, 40), np.float32)
    integers, config = np.zeros((10, count_shorts(64)), np.int16), np.zeros(64, np.uint8)
    for rows in (0, 7):
        config[:], after = 0, np.full(64, 9, np.uint8)
        config[0], config[16:18:2], config[48] = bool(rows), 4 * rows, rows
        of_config(np.array(describe_matrix(parts)), x, integers, config, after, out)
        np.testing.assert_array_equal(after, config)


def configure_and_multiply(matrix, x, integers, config, after, out):
    amx_intrinsics.load_tile_config(config)
    multiply_matrix(matrix, x, integers, x[0], 0, out.shape[1], out)
    amx_intrinsics.store_tile_config(after)
    amx_intrinsics.load_tile_config(np.zeros(64, np.uint8))


@example(torch.int8, 5, 11, 1543, 0, 11, 0)
@given(
    st.sampled_from(list(DTYPES)),
    st.integers(1, 70),
    st.integers(1, 23),
    st.integers(1, 300) | st.sampled_from([128, 768, 1543]),
    PLACES,
    PLACES,
    st.integers(0, 99),
)
def test_the_sums_are_those_of_the_numbers_and_nothing_beside_them_is_touched(dtype, count, rows, columns, a, b, seed):
    first, last = sorted((min(a, rows), min(b, rows)))
    assert_is_product(dtype, count, rows, columns, first, last, seed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.uint8])
def test_they_are_the_same_where_the_processor_lacks_the_instruction(dtype, monkeypatch):
    monkeypatch.setattr(numba_row_tiles, "PAIRWISE", None)
    monkeypatch.setattr(numba_row_tiles, "CONVERTS", False)
    again = numba.njit(multiply_matrix.py_func)
    for columns in (64, 515, 1543):
        assert_is_product(dtype, 6, 9, columns, 1, 9, run=again)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_16_bits_is_widened_exactly(dtype):
    numbers = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)[:, None]
    found, _ = multiply([numbers, None, None, None], np.ones((1, 1), np.float32), 0, 2**16)
    np.testing.assert_array_equal(found[0], numbers[:, 0].float().numpy())


def test_a_row_has_the_same_sum_beside_any_others():
    dice = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        parts, _, _ = draw_matrix(dtype, 23, 259, dice)
        x = torch.randn(7, 259, generator=dice).numpy()  # so many columns fill no tiles, for which vectors are rounded
        expected = multiply(parts, x, 0, 23)[0][2]
        for vectors, place in [(x, 2), (x[2:3], 0)]:
            whole, _ = multiply(parts, vectors, 0, 23)
            for row in range(23):
                alone, _ = multiply(parts, vectors, row, row + 1)
                assert alone[place, row] == whole[place, row] == expected[row]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_restored_rows_do_not_overflow(sign):
    """All numbers are -8 times a scale of 1."""
    stored, scales = torch.full((9, 768), 0x88, dtype=torch.uint8), torch.zeros(9, 2, 48, dtype=torch.bfloat16)
    scales[:, 0] = 1
    found, met = multiply([stored, scales, None, None], np.full((16, 1536), sign, np.float32), 0, 9)
    np.testing.assert_allclose(found, -8 * met.sum(1)[:, None].repeat(9, 1), rtol=gamma(torch.float32, 8 + math.log2(LANES)))


@pytest.mark.parametrize("lost", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", [0, 1])  # a scale, an offset
def test_a_row_of_int4_that_is_not_finite_is_not_finite_for_many_vectors(lost, part):
    parts, _, _ = draw_matrix(torch.uint8, 9, 256, torch.Generator().manual_seed(0))
    parts[1][3, part, 5] = lost
    found, _ = multiply(parts, np.ones((16, 256), np.float32), 0, 9)
    assert not np.isfinite(found[:, 3]).any()
    assert np.isfinite(np.delete(found, 3, 1)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(sign):
    numbers, groups = torch.full((9, 1536), 127, dtype=torch.int8), torch.full((9, 32), 255, dtype=torch.uint8)
    found, met = multiply([numbers, torch.ones(9), None, groups], np.full((5, 1536), sign, np.float32), 0, 9)
    expected = 127 * 255 * met.sum(1)[:, None].repeat(9, 1)
    np.testing.assert_allclose(found, expected, rtol=gamma(torch.float32, 4 + 2 * (16 // LANES) + math.log2(LANES)))


@given(
    st.lists(st.floats(-1e6, 1e6, width=32) | st.floats(-(2.0**-96), 2.0**-96, width=32), min_size=1, max_size=70),
)
def test_whole_numbers_are_the_nearest_and_reach_the_largest(numbers):
    x, whole = np.array(numbers, np.float32), np.full(count_shorts(len(numbers)), 7, np.int16)
    scale, out = quantize_vector(x, whole), whole[: len(numbers)]
    assert (scale > 0) == (np.abs(x).max() > 1e-30)
    assert np.abs(out).max() == (LARGEST if scale > 0 else 0)
    # half a whole number, and five roundings: of two divisions, which may be by the reciprocal, and of a product
    allowed = 0.5 * np.float64(scale) + gamma(torch.float32, 5) * np.abs(x).astype(np.float64)
    assert (np.abs(out * np.float64(scale) - x) <= (allowed if scale > 0 else numba_quantized.LOW)).all()


@given(st.integers(1, 300), st.integers(0, 99))
def test_vectors_of_bfloat16_are_the_nearest_and_padded_with_zeros(columns, seed):
    x, out = np.random.default_rng(seed).normal(size=columns).astype(np.float32), np.full(count_shorts(columns), 7, np.int16)
    assert round_vector(x, out) == 1
    padded = torch.from_numpy(out[: pad_columns(columns)]).view(torch.bfloat16)
    assert torch.equal(padded[:columns], torch.from_numpy(x).bfloat16())
    assert not padded[columns:].any()
