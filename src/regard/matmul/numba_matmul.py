# mypy: ignore-errors
"""The rows of a matrix times a few vectors, compiled by numba for threads that take blocks of rows until none is left.

Each function is what one thread runs, given the address of ten numbers: the count of blocks taken so far, then the addresses of
the matrix, the scales of its rows, the vectors, the bias and the output (0 for none), the numbers of rows, columns and
vectors, and the rows of a block. A vector is a row: every sum runs along contiguous memory.
"""

import numpy as np
from numba import njit, types

from regard.compiled.gemv import multiply_rows
from regard.compiled.int16_gemm import VECTORS, multiply_int8_rows, quantize_vector
from regard.compiled.intrinsics import atomic_increment, cast_to_pointer, view_array, wait_at_barrier
from regard.compiled.jit_cache import cfunc_with_cache


@njit
def multiply_shared_blocks(place, run, matrix, scales, vectors, bias, output):
    """Multiply the blocks of rows that this thread takes."""
    rows = len(matrix)
    while True:
        first = atomic_increment(place) * run
        if first >= rows:
            return
        multiply_rows(vectors, first, min(first + run, rows), matrix, scales, bias, output)


def make_callback(dtype):
    """Build the callback for a matrix of this dtype, which reads its arguments from an address."""

    @cfunc_with_cache(types.void(types.voidptr))
    def run_thread(place):
        arguments = view_array(place, 10, np.int64)
        rows, columns, count = arguments[6], arguments[7], arguments[8]
        matrix = view_array(arguments[1], (rows, columns), dtype)
        scales = view_array(arguments[2], rows, np.float32)
        vectors = view_array(arguments[3], (count, columns), np.float32)
        bias = view_array(arguments[4], rows, np.float32)
        output = view_array(arguments[5], (count, rows), np.float32)
        multiply_shared_blocks(place, arguments[9], matrix, scales, vectors, bias, output)

    return run_thread


FLOATS, BYTES = make_callback(np.float32), make_callback(np.int8)


@cfunc_with_cache(types.void(types.voidptr))
def multiply_quantized(place):
    """Multiply an int8 matrix by several vectors, which are first quantized to int16.

    The threads share the vectors, wait for one another, and then share the rows.
    """
    said = view_array(place, 15, np.int64)
    rows, columns, count, run, most = said[2], said[3], said[4], said[5], said[6]
    padded = (count + VECTORS - 1) // VECTORS * VECTORS
    matrix, scales, bias = (
        view_array(said[8], (rows, columns), np.int8),
        view_array(said[9], rows, np.float32),
        view_array(said[11], rows, np.float32),
    )
    vectors = view_array(said[10], (count, columns), np.float32)
    output = view_array(said[12], (count, rows), np.float32)
    whole, factors = view_array(said[13], (padded, columns), np.int16), view_array(said[14], padded, np.float32)
    while True:
        one = atomic_increment(place)
        if one >= count:
            break
        factors[one] = quantize_vector(vectors[one], most, whole[one])
    wait_at_barrier(said[7])
    while True:
        first = atomic_increment(cast_to_pointer(said[1:].ctypes.data)) * run
        if first >= rows:
            return
        last = min(first + run, rows)
        multiply_int8_rows(whole, factors, first, last, matrix, scales, bias, output)
