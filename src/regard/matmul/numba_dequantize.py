# mypy: ignore-errors
"""The numbers of a matrix of int8 or int4, rounded to bfloat16 in one pass, compiled by numba."""

import numpy as np
from numba import njit

from regard.compiled.bfloat16 import convert_to_float32, store_number
from regard.compiled.intrinsics import atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.matrix_formats import BLOCK, GROUP, INT8
from regard.compiled.threads import Arguments, integer_fields

CHUNK = 16  # rows that a thread takes at a time


class DequantizeArguments(Arguments):
    """The count of chunks taken so far; the format of the matrix; its size; the addresses of its parts and of the output."""

    _fields_ = integer_fields("taken format rows columns numbers scales out")


ARGUMENTS = np.dtype(DequantizeArguments)


@njit(nogil=True)
def dequantize_int8(numbers, scale, out):
    """Store numbers times their scale in out."""
    for c in range(len(numbers)):
        store_number(out, c, np.float32(numbers[c]) * scale)


@njit(nogil=True)
def dequantize_int4(pairs, low_scale, low_offset, high_scale, high_offset, low, high):
    """Store the numbers in the lower and in the upper halves of bytes times a scale plus an offset in low and in high."""
    for c in range(GROUP):
        store_number(low, c, np.float32(np.int8(pairs[c] << 4) >> 4) * low_scale + low_offset)
        store_number(high, c, np.float32(pairs[c] >> 4) * high_scale + high_offset)


@njit(nogil=True)
def dequantize_int4_row(pairs, factors, out):
    """Store a row of int4 in out; factors are the scales of its groups, followed by their offsets."""
    groups = len(out) // GROUP
    for group in range(0, groups, 2):
        at, byte = group * GROUP, group * GROUP // 2
        dequantize_int4(
            pairs[byte : byte + GROUP],
            convert_to_float32(factors[group]),
            convert_to_float32(factors[groups + group]),
            convert_to_float32(factors[group + 1]),
            convert_to_float32(factors[groups + group + 1]),
            out[at : at + GROUP],
            out[at + GROUP : at + BLOCK],
        )


@callback_with_cache(DequantizeArguments)
def dequantize_shared(place):
    """Store the rows of a matrix, whose columns are a multiple of BLOCK."""
    a = view_array(place, 1, ARGUMENTS)[0]
    rows, n, groups = a.rows, a.columns, a.columns // GROUP
    out = view_array(a.out, (rows, n), np.uint16)
    while True:
        first = atomic_increment(place) * CHUNK
        if first >= rows:
            return
        for row in range(first, min(first + CHUNK, rows)):
            if a.format == INT8:
                scales = view_array(a.scales, rows, np.float32)
                dequantize_int8(view_array(a.numbers, (rows, n), np.int8)[row], scales[row], out[row])
            else:
                factors = view_array(a.scales, (rows, 2 * groups), np.uint16)
                dequantize_int4_row(view_array(a.numbers, (rows, n // 2), np.int8)[row], factors[row], out[row])
