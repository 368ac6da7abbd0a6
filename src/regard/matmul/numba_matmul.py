# mypy: ignore-errors
"""The rows of a matrix times some vectors, compiled by numba for threads that take blocks of rows until none is left."""

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import atomic_increment, cast_to_pointer, view_array, wait_at_barrier
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.matrix_formats import FIELDS, MATRIX_FIELDS
from regard.compiled.threads import Arguments, integer_fields
from regard.matmul.numba_int16_panels import ROWS, multiply_panels, quantize_for_panels
from regard.matmul.numba_quantized import is_rounded, multiply_matrix, quantize_for


class ProductArguments(Arguments):
    """The counts of blocks of rows and of vectors taken so far; the matrix; sizes; the rows of a block; addresses.

    The rest is for a matrix that reads the vectors rounded: OpenMP's barrier and two buffers.
    """

    _fields_ = integer_fields(
        f"taken taken_vectors {' '.join(MATRIX_FIELDS)} rows columns count block x output barrier shorts integers factors"
    )


ARGUMENTS = np.dtype(ProductArguments)
TAKEN_VECTORS, MATRIX = ProductArguments.taken_vectors.offset, ProductArguments.numbers.offset


@njit_inlined()
def view_arguments(place):
    """Return an array of the arguments at an address, the matrix and arrays of these, and the place of the vectors taken."""
    arguments = view_array(place, 1, ARGUMENTS)
    a = arguments[0]
    start = view_array(place, 1, np.int64).ctypes.data
    matrix = view_array(start + MATRIX, FIELDS, np.int64)
    x = view_array(a.x, (a.count, a.columns), np.float32)
    output = view_array(a.output, (a.count, a.rows), np.float32)
    integers = view_array(a.integers, (a.count, a.shorts), np.int16)
    factors = view_array(a.factors, a.count, np.float32)
    return arguments, matrix, x, output, integers, factors, cast_to_pointer(start + TAKEN_VECTORS)


@callback_with_cache(ProductArguments)
def multiply_shared(place):
    """Multiply a matrix by some vectors, which are first rounded if it reads them so.

    The threads share the vectors, wait for one another, and then share the rows.
    """
    arguments, matrix, x, output, integers, factors, taken = view_arguments(place)
    a = arguments[0]
    if is_rounded(matrix, a.columns, a.count):
        while True:
            one = atomic_increment(taken)
            if one >= a.count:
                break
            quantize_for(matrix, x, one, integers, factors)
        wait_at_barrier(a.barrier)
    while True:
        first = atomic_increment(place) * a.block
        if first >= a.rows:
            return
        multiply_matrix(matrix, x, integers, factors, first, min(first + a.block, a.rows), output)


@callback_with_cache(ProductArguments)
def multiply_shared_panels(place):
    """Do as `multiply_shared` with a matrix of integers, by panels of rows: for many vectors."""
    arguments, matrix, x, output, integers, factors, taken = view_arguments(place)
    a = arguments[0]
    while True:
        one = atomic_increment(taken)
        if one >= a.count:
            break
        factors[one] = quantize_for_panels(x[one], one, a.count, integers)
    wait_at_barrier(a.barrier)
    block = (a.block + ROWS - 1) // ROWS * ROWS
    while True:
        first = atomic_increment(place) * block
        if first >= a.rows:
            return
        multiply_panels(matrix, a.columns, integers, factors, first, min(first + block, a.rows), output)
