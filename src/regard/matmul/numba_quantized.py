# mypy: ignore-errors
"""A matrix of float32, of 16 bits, int8 or int4 times a few vectors: how the vectors are rounded, and which loop runs.

Integers are multiplied by vectors rounded to 16-bit integers. For many vectors, rows of int4 are restored first, so that a sum
needs no scale for each group: to bfloat16, as are the vectors, if an instruction multiplies pairs of it, else to integers of 12
bits with one scale for a row.
"""

import numpy as np

from regard.compiled.bfloat16 import store_number
from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import prefetch, view_array
from regard.compiled.kernel_choice import count_least_vectors_in_pairs
from regard.compiled.matrix_formats import (
    BFLOAT16,
    BIAS,
    BLOCK,
    FORMAT,
    GROUP,
    GROUP_SCALES,
    INT4,
    INT8,
    LARGEST,
    NUMBERS,
    SCALES,
    SHORTS,
)
from regard.compiled.register_tiles import MULTIPLIES_PAIRS
from regard.compiled.vectors import ONE, REASSOCIATED, ZERO, add_bias, find_largest_bits, reinterpret_as_float32
from regard.matmul.numba_amx import EDGE, HAS_TILES, multiply_by_tiles, round_for_tiles, uses_tiles
from regard.matmul.numba_dequantize import restore_int4_row
from regard.matmul.numba_row_tiles import LEAST_RESTORED, LINE, RESTORED, ROWS, VECTORS_IN_CACHE, multiply_rows

LEAST_IN_PAIRS = count_least_vectors_in_pairs()
RESTORED_IN_L1 = 3 * 2**12  # numbers of rows that are restored at a time: half of the L1 cache
RESTORED_IN_L2 = 2**17  # of integers for so many vectors that a block of them is read from the L2 cache
LOW = np.float32(1e-30)  # vectors below this count as zeros: dividing by less may give infinity


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def find_quantization(x, largest):
    """Return by what the numbers of a vector are multiplied to become integers up to the largest, and the scale of these.

    Both are 0 for zeros; the scale is NaN if a number is not finite.
    """
    top = reinterpret_as_float32(find_largest_bits(x))
    factor = np.float32(largest) / top if LOW < top < np.inf else ZERO
    return factor, top / np.float32(largest) if factor > ZERO else ZERO * top


@njit_inlined(fastmath=REASSOCIATED)
def store_integers(x, factor, out):
    """Set out to the integers nearest to x times a factor, and to 0 after them."""
    for c in range(len(x)):
        out[c] = np.int16(np.rint(x[c] * factor))
    out[len(x) :] = 0


@njit_inlined()
def quantize_vector(x, out):
    """Quantize a vector to 16-bit integers; return their scale, NaN if a number is not finite. The padding of out becomes 0."""
    factor, scale = find_quantization(x, LARGEST)
    store_integers(x, factor, out[: len(out) // SHORTS * BLOCK])
    return scale


@njit_inlined()
def sum_groups(out):
    """Store the sums of the integers of each GROUP of a quantized vector after them, as float32."""
    padded = len(out) // SHORTS * BLOCK
    sums = view_array(out.ctypes.data + 2 * padded, padded // GROUP, np.float32)
    for group in range(len(sums)):
        total = 0
        for c in range(GROUP * group, GROUP * (group + 1)):
            total += out[c]
        sums[group] = total


@njit_inlined()
def is_restored(matrix, count):
    """Return whether the rows of a matrix are restored for so many vectors."""
    return LEAST_RESTORED > 0 and matrix[FORMAT] == INT4 and count >= LEAST_RESTORED


@njit_inlined()
def uses_pairs(matrix, count):
    """Return whether so many vectors are rounded to bfloat16, as the matrix is, and multiplied in pairs."""
    return LEAST_IN_PAIRS > 0 and matrix[FORMAT] == BFLOAT16 and count >= LEAST_IN_PAIRS


@njit_inlined()
def round_vector(x, out):
    """Round a vector to bfloat16; return 1, its scale. The padding of out becomes 0."""
    numbers = out.view(np.uint16)
    for c in range(len(x)):
        store_number(numbers, c, x[c])
    out[len(x) : len(out) // SHORTS * BLOCK] = 0
    return ONE


@njit_inlined()
def scale_outputs(out, factor, scales):
    """Multiply the outputs of a vector by its scale and those of the rows, if there are any.

    Its own comes first if it is below 1, else last: the outputs are about as large as integers, so that no product between is
    infinite or 0 unless the last one is.
    """
    for j in range(len(out)):
        scale = scales[j] if len(scales) else ONE
        out[j] = out[j] * factor * scale if factor < ONE else out[j] * scale * factor


@njit_inlined()
def prefetch_rows(address, size, first, last):
    """Request the rows of an array from first to last, of `size` bytes each."""
    for n in range(size * first, size * last, LINE):
        prefetch(address + n)


@njit_inlined()
def multiply_restored_rows(matrix, width, vectors, size, count, first, last, out):
    """Set out[v, row] to the products of rows of int4, restored, with the vectors that they are restored for."""
    numbers = RESTORED_IN_L1 if MULTIPLIES_PAIRS or count <= VECTORS_IN_CACHE else RESTORED_IN_L2
    step = max(numbers // width // ROWS, 1) * ROWS
    restored, factors, rows = np.empty(step * width, np.uint16), np.empty(step, np.float32), out.shape[1]
    for row in range(first, last, step):
        some = min(step, last - row)
        for r in range(some):
            pairs, scales = matrix[NUMBERS] + width // 2 * (row + r), matrix[SCALES] + width // GROUP * 4 * (row + r)
            factors[r] = restore_int4_row(pairs, scales, width, restored.ctypes.data + 2 * width * r)
        prefetch_rows(matrix[NUMBERS], width // 2, row + some, min(row + some + step, last))
        prefetch_rows(matrix[SCALES], width // GROUP * 4, row + some, min(row + some + step, last))
        multiply_rows(RESTORED, restored.ctypes.data, 0, width, vectors, size, count, 0, some, out.ctypes.data + 4 * row, rows)
        for one in range(0 if MULTIPLIES_PAIRS else count):
            scale_outputs(out[one, row : row + some], ONE, factors[:some])


@njit_inlined()
def is_rounded(matrix, columns, count):
    """Return whether a matrix reads so many vectors rounded, as `quantize_for` does it."""
    return matrix[FORMAT] >= INT8 or uses_pairs(matrix, count) or (HAS_TILES and uses_tiles(matrix, columns, count))


@njit_inlined()
def quantize_for(matrix, x, one, integers, factors):
    """Round one of some vectors for a matrix, to integers or to bfloat16, and set its scale.

    For tiles, the first vector of each also rounds the others.
    """
    out, count = integers[one], len(x)
    if HAS_TILES and uses_tiles(matrix, x.shape[1], count):  # nothing of it is compiled without tiles
        if one % EDGE == 0:
            round_for_tiles(matrix, x, one, integers, factors)
        return
    restores = is_restored(matrix, count)
    if uses_pairs(matrix, count) or (restores and MULTIPLIES_PAIRS):
        factors[one] = round_vector(x[one], out)
        return
    factors[one] = quantize_vector(x[one], out)
    if matrix[FORMAT] == INT4 and not restores:
        sum_groups(out)


@njit_inlined()
def multiply_matrix(matrix, x, integers, factors, first, last, out):
    """Set out[v, row] = matrix[row] x[v] + bias[row] for the rows from first to last.

    x is (count, columns), out (count, rows), both contiguous. If `is_rounded`, a matrix reads, instead of x, integers
    (count, count_shorts(columns)) and their scales `factors`, which `quantize_for` computes.
    """
    kind, count, columns, rows = matrix[FORMAT], len(x), x.shape[1], out.shape[1]
    is_integer, in_pairs = kind >= INT8, uses_pairs(matrix, count)
    vectors, size = x.ctypes.data, 4 * columns
    if is_integer or in_pairs:
        vectors, size = integers.ctypes.data, 2 * integers.shape[1]
    width = integers.shape[1] // SHORTS * BLOCK if kind == INT4 else columns
    if HAS_TILES and uses_tiles(matrix, columns, count):
        multiply_by_tiles(matrix, columns, integers, count, first, last, out)
    elif is_restored(matrix, count):
        multiply_restored_rows(matrix, width, vectors, size, count, first, last, out)
    else:
        stored, groups = RESTORED if in_pairs else kind, matrix[GROUP_SCALES if kind == INT8 else SCALES]
        multiply_rows(stored, matrix[NUMBERS], groups, width, vectors, size, count, first, last, out.ctypes.data, rows)
    bias, scales = (
        view_array(matrix[BIAS], rows, np.float32),
        view_array(matrix[SCALES] if kind == INT8 else 0, rows, np.float32),
    )
    for one in range(count):
        if is_integer:
            scale_outputs(out[one, first:last], factors[one], scales[first:last])
        if len(bias):
            add_bias(out[one, first:last], bias[first:last])
