# mypy: ignore-errors
"""Fused training loops compiled by numba: cross entropy and GELU, forward and backward, in one pass each.

Each function is the work of one of torch's threads. It is given the address of an array of numbers: how many runs have been
taken, the numbers of rows and columns, and the addresses of the arrays. Sums are float32, whatever the dtype in memory.
"""

import math
from functools import cache

import numpy as np
from numba import carray, njit, types

from regard.compiled.bfloat16 import convert_to_float32, store_number
from regard.compiled.intrinsics import atomic_increment, cast_to_pointer
from regard.compiled.jit_cache import cfunc_with_cache
from regard.compiled.vectors import LEAST, LOWEST, ONE, REASSOCIATED, ZERO, exponential

ARGUMENT_COUNT = 8  # arguments of a loop
CHUNK_ROWS = 16  # rows, or units of 1024 numbers, that a thread takes at a time
SLOPE, CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)  # of GELU
THREE = np.float32(3)


# each goes over whole arrays: numba vectorizes loops that start at 0, and not those that start elsewhere


@njit(fastmath=REASSOCIATED, nogil=True)
def find_largest(x):
    """Return the largest of some numbers."""
    top = LEAST
    for j in range(len(x)):
        top = max(top, convert_to_float32(x[j]))
    return top


@njit(fastmath=REASSOCIATED, nogil=True)
def sum_exponentials(x, shift):
    """Compute Σ exp(x - shift)."""
    found = ZERO
    for j in range(len(x)):
        z = convert_to_float32(x[j]) - shift
        found += exponential(LOWEST if z <= LOWEST else z)
    return found


@njit(fastmath=REASSOCIATED, nogil=True)
def store_softmax_gradient(x, lse, factor, out):
    """Store factor exp(x - lse) in out."""
    for j in range(len(x)):
        z = min(convert_to_float32(x[j]) - lse, ZERO)
        weight = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)  # wrong inside the call of put
        store_number(out, j, weight * factor)


@njit(nogil=True)
def fill_with_zeros(out):
    """Fill out with 0."""
    for j in range(len(out)):
        store_number(out, j, ZERO)


@njit(fastmath=REASSOCIATED, error_model="numpy", nogil=True)  # which divides without checking for 0
def store_gelu(x, out):
    """Store x sigmoid(2 √(2/π) (x + 0.044715 x³)) in out."""
    for j in range(len(x)):
        a = convert_to_float32(x[j])
        z = SLOPE * (a + CUBE * a * a * a)
        e = exponential(max(-abs(z), LOWEST))
        s = (ONE if z > ZERO else e) / (ONE + e)
        store_number(out, j, a * s)


@njit(fastmath=REASSOCIATED, error_model="numpy", nogil=True)  # which divides without checking for 0
def store_gelu_gradient(x, grad, out):
    """Store grad times the derivative of GELU at x in out."""
    for j in range(len(x)):
        a = convert_to_float32(x[j])
        z = SLOPE * (a + CUBE * a * a * a)
        e = exponential(max(-abs(z), LOWEST))
        s = (ONE if z > ZERO else e) / (ONE + e)
        bend = e / ((ONE + e) * (ONE + e))  # s (1 - s), without its cancellation
        store_number(out, j, convert_to_float32(grad[j]) * (s + a * bend * SLOPE * (ONE + THREE * CUBE * a * a)))


@cache
def make_logsumexp_callback(kind):
    """Make the loop that computes the log-sum-exp of each row; arguments: rows, columns, addresses of logits and output."""
    dtype = np.dtype(kind).type

    @cfunc_with_cache(types.void(types.voidptr))
    def compute_rows(place):
        said = carray(place, ARGUMENT_COUNT, np.int64)
        rows, n = said[1], said[2]
        x, lse = carray(cast_to_pointer(said[3]), (rows * n,), dtype), carray(cast_to_pointer(said[4]), (rows,), np.float32)
        while True:
            first = atomic_increment(place) * CHUNK_ROWS
            if first >= rows:
                return
            for row in range(first, min(first + CHUNK_ROWS, rows)):
                own = x[row * n : row * n + n]
                top = find_largest(own)
                shift = top if top > LEAST else ZERO
                lse[row] = shift + np.float32(math.log(sum_exponentials(own, shift)))

    return compute_rows


@cache
def make_entropy_gradient_callback(kind):
    """Make the loop of factor (softmax - 1 at the target) in each row, 0 where factor is 0.

    Arguments: those of `entropy`, and the addresses of targets, factors and output.
    """
    dtype = np.dtype(kind).type

    @cfunc_with_cache(types.void(types.voidptr))
    def compute_rows(place):
        said = carray(place, ARGUMENT_COUNT, np.int64)
        rows, n = said[1], said[2]
        x, lse = carray(cast_to_pointer(said[3]), (rows * n,), dtype), carray(cast_to_pointer(said[4]), (rows,), np.float32)
        targets, factors = (
            carray(cast_to_pointer(said[5]), (rows,), np.int64),
            carray(cast_to_pointer(said[6]), (rows,), np.float32),
        )
        out = carray(cast_to_pointer(said[7]), (rows * n,), dtype)
        while True:
            first = atomic_increment(place) * CHUNK_ROWS
            if first >= rows:
                return
            for row in range(first, min(first + CHUNK_ROWS, rows)):
                factor, own, to = factors[row], x[row * n : row * n + n], out[row * n : row * n + n]
                if factor == ZERO:  # whatever the logits are, infinities too
                    fill_with_zeros(to)
                else:
                    store_softmax_gradient(own, lse[row], factor, to)
                    weight = np.float32(math.exp(convert_to_float32(own[targets[row]]) - lse[row]))
                    store_number(to, targets[row], (weight - ONE) * factor)

    return compute_rows


@cache
def make_gelu_callback(kind):
    """Make the loop of GELU; arguments: an unused number, the number of elements, the addresses of input and output."""
    dtype = np.dtype(kind).type

    @cfunc_with_cache(types.void(types.voidptr))
    def compute_elements(place):
        said = carray(place, ARGUMENT_COUNT, np.int64)
        count = said[2]
        x, out = carray(cast_to_pointer(said[3]), (count,), dtype), carray(cast_to_pointer(said[4]), (count,), dtype)
        while True:
            first = atomic_increment(place) * CHUNK_ROWS * 1024
            if first >= count:
                return
            last = min(first + CHUNK_ROWS * 1024, count)
            store_gelu(x[first:last], out[first:last])

    return compute_elements


@cache
def make_gelu_gradient_callback(kind):
    """Make the loop of GELU's gradient; arguments: those of `activation`, the gradient's address before the output's."""
    dtype = np.dtype(kind).type

    @cfunc_with_cache(types.void(types.voidptr))
    def compute_elements(place):
        said = carray(place, ARGUMENT_COUNT, np.int64)
        count = said[2]
        x, grad = carray(cast_to_pointer(said[3]), (count,), dtype), carray(cast_to_pointer(said[4]), (count,), dtype)
        out = carray(cast_to_pointer(said[5]), (count,), dtype)
        while True:
            first = atomic_increment(place) * CHUNK_ROWS * 1024
            if first >= count:
                return
            last = min(first + CHUNK_ROWS * 1024, count)
            store_gelu_gradient(x[first:last], grad[first:last], out[first:last])

    return compute_elements
