# mypy: ignore-errors
"""Fused training loops compiled by numba: cross entropy and GELU, forward and backward, in one pass each.

Each function is the work of one of torch's threads. It is given the address of an array of numbers: how many runs have been
taken, the numbers of rows and columns, and the addresses of the arrays. Sums are float32, whatever the dtype in memory.
"""

import math
from functools import cache

import numpy as np
from numba import carray, njit, types

from regard.compiled.halves import put, read
from regard.compiled.kept import callback
from regard.compiled.pointers import at, take
from regard.compiled.vectors import LEAST, LOWEST, ONE, REASSOCIATED, ZERO, exponential

SAID = 8  # arguments of a loop
RUN = 16  # rows, or units of 1024 numbers, that a thread takes at a time
SLOPE, CUBE = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)  # of GELU
THREE = np.float32(3)


# each goes over whole arrays: numba vectorizes loops that start at 0, and not those that start elsewhere


@njit(fastmath=REASSOCIATED, nogil=True)
def largest(x):
    """Return the largest of some numbers."""
    top = LEAST
    for j in range(len(x)):
        top = max(top, read(x[j]))
    return top


@njit(fastmath=REASSOCIATED, nogil=True)
def total(x, shift):
    """Compute Σ exp(x - shift)."""
    found = ZERO
    for j in range(len(x)):
        z = read(x[j]) - shift
        found += exponential(LOWEST if z <= LOWEST else z)
    return found


@njit(fastmath=REASSOCIATED, nogil=True)
def slope(x, lse, factor, out):
    """Store factor exp(x - lse) in out."""
    for j in range(len(x)):
        z = min(read(x[j]) - lse, ZERO)
        weight = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)  # wrong inside the call of put
        put(out, j, weight * factor)


@njit(nogil=True)
def blank(out):
    """Fill out with 0."""
    for j in range(len(out)):
        put(out, j, ZERO)


@njit(fastmath=REASSOCIATED, error_model="numpy", nogil=True)  # which divides without checking for 0
def gelu(x, out):
    """Store x sigmoid(2 √(2/π) (x + 0.044715 x³)) in out."""
    for j in range(len(x)):
        a = read(x[j])
        z = SLOPE * (a + CUBE * a * a * a)
        e = exponential(max(-abs(z), LOWEST))
        s = (ONE if z > ZERO else e) / (ONE + e)
        put(out, j, a * s)


@njit(fastmath=REASSOCIATED, error_model="numpy", nogil=True)  # which divides without checking for 0
def gelu_slope(x, grad, out):
    """Store grad times the derivative of GELU at x in out."""
    for j in range(len(x)):
        a = read(x[j])
        z = SLOPE * (a + CUBE * a * a * a)
        e = exponential(max(-abs(z), LOWEST))
        s = (ONE if z > ZERO else e) / (ONE + e)
        bend = e / ((ONE + e) * (ONE + e))  # s (1 - s), without its cancellation
        put(out, j, read(grad[j]) * (s + a * bend * SLOPE * (ONE + THREE * CUBE * a * a)))


@cache
def entropy(kind):
    """Make the loop that computes the log-sum-exp of each row; arguments: rows, columns, addresses of logits and output."""
    dtype = np.dtype(kind).type

    @callback(types.void(types.voidptr))
    def work(place):
        said = carray(place, SAID, np.int64)
        rows, n = said[1], said[2]
        x, lse = carray(at(said[3]), (rows * n,), dtype), carray(at(said[4]), (rows,), np.float32)
        while True:
            first = take(place) * RUN
            if first >= rows:
                return
            for row in range(first, min(first + RUN, rows)):
                own = x[row * n : row * n + n]
                top = largest(own)
                shift = top if top > LEAST else ZERO
                lse[row] = shift + np.float32(math.log(total(own, shift)))

    return work


@cache
def entropy_slope(kind):
    """Make the loop of factor (softmax - 1 at the target) in each row, 0 where factor is 0.

    Arguments: those of `entropy`, and the addresses of targets, factors and output.
    """
    dtype = np.dtype(kind).type

    @callback(types.void(types.voidptr))
    def work(place):
        said = carray(place, SAID, np.int64)
        rows, n = said[1], said[2]
        x, lse = carray(at(said[3]), (rows * n,), dtype), carray(at(said[4]), (rows,), np.float32)
        targets, factors = carray(at(said[5]), (rows,), np.int64), carray(at(said[6]), (rows,), np.float32)
        out = carray(at(said[7]), (rows * n,), dtype)
        while True:
            first = take(place) * RUN
            if first >= rows:
                return
            for row in range(first, min(first + RUN, rows)):
                factor, own, to = factors[row], x[row * n : row * n + n], out[row * n : row * n + n]
                if factor == ZERO:  # whatever the logits are, infinities too
                    blank(to)
                else:
                    slope(own, lse[row], factor, to)
                    weight = np.float32(math.exp(read(own[targets[row]]) - lse[row]))
                    put(to, targets[row], (weight - ONE) * factor)

    return work


@cache
def activation(kind):
    """Make the loop of GELU; arguments: an unused number, the number of elements, the addresses of input and output."""
    dtype = np.dtype(kind).type

    @callback(types.void(types.voidptr))
    def work(place):
        said = carray(place, SAID, np.int64)
        count = said[2]
        x, out = carray(at(said[3]), (count,), dtype), carray(at(said[4]), (count,), dtype)
        while True:
            first = take(place) * RUN * 1024
            if first >= count:
                return
            last = min(first + RUN * 1024, count)
            gelu(x[first:last], out[first:last])

    return work


@cache
def activation_slope(kind):
    """Make the loop of GELU's gradient; arguments: those of `activation`, the gradient's address before the output's."""
    dtype = np.dtype(kind).type

    @callback(types.void(types.voidptr))
    def work(place):
        said = carray(place, SAID, np.int64)
        count = said[2]
        x, grad = carray(at(said[3]), (count,), dtype), carray(at(said[4]), (count,), dtype)
        out = carray(at(said[5]), (count,), dtype)
        while True:
            first = take(place) * RUN * 1024
            if first >= count:
                return
            last = min(first + RUN * 1024, count)
            gelu_slope(x[first:last], grad[first:last], out[first:last])

    return work
