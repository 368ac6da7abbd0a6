# mypy: ignore-errors
"""weightᵀ tanh(q + k) and its gradient, compiled by numba: only the sum of each pair of query and key is stored.

A thread takes one matrix of queries and keys after another. The backward pass computes the tanh again, which is faster than
to store and load it.
"""

import numpy as np
from numba import carray, njit, types

from regard.compiled.intrinsics import atomic_increment, cast_to_pointer
from regard.compiled.jit_cache import cfunc_with_cache
from regard.compiled.vectors import ONE, REASSOCIATED, ZERO, hyperbolic_tangent

ARGUMENT_COUNT = 13  # numbers in the arguments of a thread


@njit(fastmath=REASSOCIATED, error_model="numpy", nogil=True)
def score_pair(q, k, weight):
    """Compute Σ weight tanh(q + k) of one query and one key."""
    total = ZERO
    for n in range(len(weight)):
        total += weight[n] * hyperbolic_tangent(q[n] + k[n])
    return total


@njit(fastmath=REASSOCIATED, error_model="numpy", nogil=True)
def accumulate_pair_gradients(q, k, weight, slope, dq, dk, dweight):
    """Add the gradients from one score's slope to those of its query, its key and the weight."""
    for n in range(len(weight)):
        t = hyperbolic_tangent(q[n] + k[n])
        rise = slope * weight[n] * (ONE - t * t)
        dq[n] += rise
        dk[n] += rise
        dweight[n] += slope * t


@njit(nogil=True)
def read_arguments(arguments):
    """Read the sizes, the number of matrices, queries, keys and numbers of each, and the arrays that both passes use."""
    units, queries, keys, n = arguments[1], arguments[2], arguments[3], arguments[4]
    q, k = (
        carray(cast_to_pointer(arguments[5]), (units, queries, n), np.float32),
        carray(cast_to_pointer(arguments[6]), (units, keys, n), np.float32),
    )
    return (
        q,
        k,
        carray(cast_to_pointer(arguments[7]), (n,), np.float32),
        carray(cast_to_pointer(arguments[8]), (units, queries, keys), np.float32),
    )


@cfunc_with_cache(types.void(types.voidptr))
def compute_scores(place):
    """Compute the scores."""
    q, k, weight, scores = read_arguments(carray(place, ARGUMENT_COUNT, np.int64))
    while True:
        unit = atomic_increment(place)
        if unit >= len(q):
            return
        for i in range(q.shape[1]):
            for j in range(k.shape[1]):
                scores[unit, i, j] = score_pair(q[unit, i], k[unit, j], weight)


@cfunc_with_cache(types.void(types.voidptr))
def compute_gradients(place):
    """Add the gradients of q and k, and that of the weight, a row for each matrix, to arrays that start as zeros."""
    arguments = carray(place, ARGUMENT_COUNT, np.int64)
    q, k, weight, slopes = read_arguments(arguments)
    dq, dk = (
        carray(cast_to_pointer(arguments[9]), q.shape, np.float32),
        carray(cast_to_pointer(arguments[10]), k.shape, np.float32),
    )
    dweight = carray(cast_to_pointer(arguments[11]), (q.shape[0], q.shape[2]), np.float32)
    while True:
        unit = atomic_increment(place)
        if unit >= len(q):
            return
        for i in range(q.shape[1]):
            for j in range(k.shape[1]):
                slope = slopes[unit, i, j]
                if slope != ZERO:  # 0 for a hidden key
                    accumulate_pair_gradients(q[unit, i], k[unit, j], weight, slope, dq[unit, i], dk[unit, j], dweight[unit])
