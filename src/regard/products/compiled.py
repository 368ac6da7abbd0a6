# mypy: ignore-errors
"""The rows of a matrix times a few vectors, compiled by numba for threads that take blocks of rows until none is left.

Each function is what one thread runs, given the address of ten numbers: the count of blocks taken so far, then the addresses of
the matrix, the scales of its rows, the vectors, the bias and the output (0 for none), the numbers of rows, columns and
vectors, and the rows of a block. A vector is a row: every sum runs along contiguous memory.
"""

import numpy as np
from numba import njit, types

from regard.compiled.kept import callback
from regard.compiled.pointers import at, meet, take, view
from regard.compiled.rows import multiply_rows
from regard.compiled.shorts import VECTORS, multiply_bytes, shorten


@njit
def share(place, run, matrix, scales, vectors, bias, output):
    """Multiply the blocks of rows that this thread takes."""
    rows = len(matrix)
    while True:
        first = take(place) * run
        if first >= rows:
            return
        multiply_rows(vectors, first, min(first + run, rows), matrix, scales, bias, output)


def shared(dtype):
    """Build the callback for a matrix of this dtype, which reads its arguments from an address."""

    @callback(types.void(types.voidptr))
    def work(place):
        said = view(place, 10, np.int64)
        rows, columns, count = said[6], said[7], said[8]
        matrix = view(said[1], (rows, columns), dtype)
        scales = view(said[2], rows, np.float32)
        vectors = view(said[3], (count, columns), np.float32)
        bias = view(said[4], rows, np.float32)
        output = view(said[5], (count, rows), np.float32)
        share(place, said[9], matrix, scales, vectors, bias, output)

    return work


FLOATS, BYTES = shared(np.float32), shared(np.int8)


@callback(types.void(types.voidptr))
def SHORTS(place):
    """Multiply an int8 matrix by several vectors, which are first quantized to int16.

    The threads share the vectors, wait for one another, and then share the rows.
    """
    said = view(place, 15, np.int64)
    rows, columns, count, run, most = said[2], said[3], said[4], said[5], said[6]
    padded = (count + VECTORS - 1) // VECTORS * VECTORS
    matrix, scales, bias = (
        view(said[8], (rows, columns), np.int8),
        view(said[9], rows, np.float32),
        view(said[11], rows, np.float32),
    )
    vectors = view(said[10], (count, columns), np.float32)
    output = view(said[12], (count, rows), np.float32)
    whole, factors = view(said[13], (padded, columns), np.int16), view(said[14], padded, np.float32)
    while True:
        one = take(place)
        if one >= count:
            break
        factors[one] = shorten(vectors[one], most, whole[one])
    meet(said[7])
    while True:
        first = take(at(said[1:].ctypes.data)) * run
        if first >= rows:
            return
        last = min(first + run, rows)
        multiply_bytes(whole, factors, first, last, matrix, scales, bias, output)
