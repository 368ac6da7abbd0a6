# mypy: ignore-errors
"""weightᵀ tanh(q + k) and its gradient, compiled by numba: only the sum of each pair of query and key is stored.

A thread takes one matrix of queries and keys after another. The backward pass computes the tanh again, which is faster than
to store and load it.
"""

import numpy as np
from numba import carray, njit, types

from regard.compiled.kept import callback
from regard.compiled.pointers import at, take
from regard.compiled.vectors import ONE, REASSOCIATED, ZERO, tangent

SAID = 13  # numbers in the arguments of a thread


@njit(fastmath=REASSOCIATED, error_model="numpy", nogil=True)
def score(q, k, weight):
    """Compute Σ weight tanh(q + k) of one query and one key."""
    total = ZERO
    for n in range(len(weight)):
        total += weight[n] * tangent(q[n] + k[n])
    return total


@njit(fastmath=REASSOCIATED, error_model="numpy", nogil=True)
def bend(q, k, weight, slope, dq, dk, dweight):
    """Add the gradients from one score's slope to those of its query, its key and the weight."""
    for n in range(len(weight)):
        t = tangent(q[n] + k[n])
        rise = slope * weight[n] * (ONE - t * t)
        dq[n] += rise
        dk[n] += rise
        dweight[n] += slope * t


@njit(nogil=True)
def met(said):
    """Read the sizes, the number of matrices, queries, keys and numbers of each, and the arrays that both passes use."""
    units, queries, keys, n = said[1], said[2], said[3], said[4]
    q, k = carray(at(said[5]), (units, queries, n), np.float32), carray(at(said[6]), (units, keys, n), np.float32)
    return q, k, carray(at(said[7]), (n,), np.float32), carray(at(said[8]), (units, queries, keys), np.float32)


@callback(types.void(types.voidptr))
def ahead(place):
    """Compute the scores."""
    q, k, weight, scores = met(carray(place, SAID, np.int64))
    while True:
        unit = take(place)
        if unit >= len(q):
            return
        for i in range(q.shape[1]):
            for j in range(k.shape[1]):
                scores[unit, i, j] = score(q[unit, i], k[unit, j], weight)


@callback(types.void(types.voidptr))
def back(place):
    """Add the gradients of q and k, and that of the weight, a row for each matrix, to arrays that start as zeros."""
    said = carray(place, SAID, np.int64)
    q, k, weight, slopes = met(said)
    dq, dk = carray(at(said[9]), q.shape, np.float32), carray(at(said[10]), k.shape, np.float32)
    dweight = carray(at(said[11]), (q.shape[0], q.shape[2]), np.float32)
    while True:
        unit = take(place)
        if unit >= len(q):
            return
        for i in range(q.shape[1]):
            for j in range(k.shape[1]):
                slope = slopes[unit, i, j]
                if slope != ZERO:  # 0 for a hidden key
                    bend(q[unit, i], k[unit, j], weight, slope, dq[unit, i], dk[unit, j], dweight[unit])
