# mypy: ignore-errors
"""The rows of a matrix times a few vectors, compiled by numba for threads that take blocks of rows until none is left.

Each function is what one thread runs. A vector is a row: every sum runs along contiguous memory.
"""

import numpy as np
from numba import njit

from regard.compiled.gemv import multiply_rows
from regard.compiled.int8_gemm import VECTORS, multiply_int8_rows, quantize_vector
from regard.compiled.intrinsics import atomic_increment, cast_to_pointer, view_array, wait_at_barrier
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.threads import Arguments, integer_fields


class ProductArguments(Arguments):
    """The counts of blocks of rows and of vectors taken so far; sizes; the rows of a block; addresses, 0 for none.

    The rest is for vectors that are quantized first: OpenMP's barrier, the largest integer of a vector, and two buffers.
    """

    _fields_ = integer_fields(
        "taken taken_vectors rows columns count block matrix scales x bias output barrier largest integers factors"
    )


FIELDS = np.dtype(ProductArguments)
TAKEN_VECTORS = ProductArguments.taken_vectors.offset


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

    @callback_with_cache(ProductArguments)
    def run_thread(place):
        arguments = view_array(place, 1, FIELDS)[0]
        rows, columns, count = arguments.rows, arguments.columns, arguments.count
        matrix = view_array(arguments.matrix, (rows, columns), dtype)
        scales, bias = view_array(arguments.scales, rows, np.float32), view_array(arguments.bias, rows, np.float32)
        vectors = view_array(arguments.x, (count, columns), np.float32)
        output = view_array(arguments.output, (count, rows), np.float32)
        multiply_shared_blocks(place, arguments.block, matrix, scales, vectors, bias, output)

    return run_thread


FLOATS, BYTES = make_callback(np.float32), make_callback(np.int8)


@callback_with_cache(ProductArguments)
def multiply_quantized(place):
    """Multiply an int8 matrix by several vectors, which are first quantized to int16.

    The threads share the vectors, wait for one another, and then share the rows.
    """
    arguments = view_array(place, 1, FIELDS)[0]
    rows, columns, count, run = arguments.rows, arguments.columns, arguments.count, arguments.block
    padded = (count + VECTORS - 1) // VECTORS * VECTORS
    matrix, scales = view_array(arguments.matrix, (rows, columns), np.int8), view_array(arguments.scales, rows, np.float32)
    vectors, bias = view_array(arguments.x, (count, columns), np.float32), view_array(arguments.bias, rows, np.float32)
    output = view_array(arguments.output, (count, rows), np.float32)
    integers = view_array(arguments.integers, (padded, columns), np.int16)
    factors = view_array(arguments.factors, padded, np.float32)
    taken_vectors = cast_to_pointer(view_array(place, 1, np.int64).ctypes.data + TAKEN_VECTORS)
    while True:
        one = atomic_increment(taken_vectors)
        if one >= count:
            break
        factors[one] = quantize_vector(vectors[one], arguments.largest, integers[one])
    wait_at_barrier(arguments.barrier)
    while True:
        first = atomic_increment(place) * run
        if first >= rows:
            return
        last = min(first + run, rows)
        multiply_int8_rows(integers, factors, first, last, matrix, scales, bias, output)
