# mypy: ignore-errors
"""The rows of a matrix times a few vectors, compiled by numba for threads that take runs of rows until none is left.

Each function here is what one thread does, given the address of ten numbers: how many runs have been taken, then where
the matrix, the scales of its rows, the vectors, the bias and the output begin (0 where there is none), how many rows,
columns and vectors there are, and how many rows a run has. A vector is a row: every sum runs along the memory.
"""

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

REASSOCIATED = {"reassoc", "nsz", "arcp", "contract"}  # sums in any order; infinities and NaN keep their meaning


@intrinsic
def take(context, place):
    """The next run that no thread has taken: the number at this address, which is one more from then on."""

    def generate(context, builder, signature, arguments):
        at = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.voidptr), generate


@intrinsic
def at(context, address):
    """What lies at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@njit(fastmath=REASSOCIATED)
def dot(a, b):
    """The sum of the products of the numbers of a with those of b."""
    total = np.float32(0)
    for c in range(len(a)):
        total += np.float32(a[c]) * b[c]
    return total


@njit
def share(place, run, matrix, scales, vectors, bias, output):
    """What one thread does."""
    rows = len(matrix)
    while True:
        first = take(place) * run
        if first >= rows:
            return
        for row in range(first, min(first + run, rows)):
            scale = scales[row] if len(scales) else np.float32(1)
            added = bias[row] if len(bias) else np.float32(0)
            for one in range(len(vectors)):
                output[one, row] = dot(matrix[row], vectors[one]) * scale + added


def shared(dtype):
    """The same for a matrix of this dtype, of addresses."""

    @cfunc(types.void(types.voidptr), cache=True)
    def work(place):
        said = carray(place, 10, np.int64)
        rows, columns, count = said[6], said[7], said[8]
        matrix = carray(at(said[1]), (rows, columns), dtype)
        scales = carray(at(said[2]), (rows if said[2] else 0,), np.float32)
        vectors = carray(at(said[3]), (count, columns), np.float32)
        bias = carray(at(said[4]), (rows if said[4] else 0,), np.float32)
        output = carray(at(said[5]), (count, rows), np.float32)
        share(place, said[9], matrix, scales, vectors, bias, output)

    return work


FLOATS, BYTES = shared(np.float32), shared(np.int8)
