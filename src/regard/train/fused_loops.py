# mypy: ignore-errors
"""Fused training loops compiled by numba: cross entropy, forward and backward, in one pass each.

Each function is the work of one of torch's threads. Sums are float32, whatever the dtype in memory.
"""

import math
from functools import cache

import numpy as np

from regard.compiled.bfloat16 import convert_to_float32, store_number
from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import LEAST, LOWEST, ONE, REASSOCIATED, ZERO, exponential

CHUNK_ROWS = 16  # rows that a thread takes at a time


class LoopArguments(Arguments):
    """The arguments of a loop: the count of chunks taken so far, sizes, and addresses of arrays."""

    _fields_ = integer_fields("taken rows columns x lse targets factors out")


FIELDS = np.dtype(LoopArguments)


# each goes over whole arrays: numba vectorizes loops that start at 0, and not those that start elsewhere


@njit_inlined(fastmath=REASSOCIATED)
def find_largest(x):
    """Return the largest of some numbers."""
    top = LEAST
    for j in range(len(x)):
        top = max(top, convert_to_float32(x[j]))
    return top


@njit_inlined(fastmath=REASSOCIATED)
def sum_exponentials(x, shift):
    """Compute Σ exp(x - shift)."""
    found = ZERO
    for j in range(len(x)):
        z = convert_to_float32(x[j]) - shift
        found += exponential(LOWEST if z <= LOWEST else z)
    return found


@njit_inlined(fastmath=REASSOCIATED)
def store_softmax_gradient(x, lse, factor, out):
    """Store factor exp(x - lse) in out."""
    for j in range(len(x)):
        z = min(convert_to_float32(x[j]) - lse, ZERO)
        weight = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)  # wrong inside the call of put
        store_number(out, j, weight * factor)


@njit_inlined()
def fill_with_zeros(out):
    """Fill out with 0."""
    for j in range(len(out)):
        store_number(out, j, ZERO)


@cache
def make_logsumexp_callback(kind):
    """Make the loop that computes the log-sum-exp `lse` of each row of x, (rows, columns)."""
    dtype = np.dtype(kind).type

    @callback_with_cache(LoopArguments)
    def compute_rows(place):
        arguments = view_array(place, 1, FIELDS)[0]
        rows, n = arguments.rows, arguments.columns
        x, lse = view_array(arguments.x, rows * n, dtype), view_array(arguments.lse, rows, np.float32)
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
    """Make the loop of factor (softmax - 1 at the target) in each row of x, 0 where factor is 0; it writes `out`."""
    dtype = np.dtype(kind).type

    @callback_with_cache(LoopArguments)
    def compute_rows(place):
        arguments = view_array(place, 1, FIELDS)[0]
        rows, n = arguments.rows, arguments.columns
        x, lse = view_array(arguments.x, rows * n, dtype), view_array(arguments.lse, rows, np.float32)
        targets, factors = view_array(arguments.targets, rows, np.int64), view_array(arguments.factors, rows, np.float32)
        out = view_array(arguments.out, rows * n, dtype)
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
