# mypy: ignore-errors
"""weightᵀ tanh(q + k) and its gradient, compiled by numba: only the sum of each pair of query and key is stored.

A thread takes one matrix of queries and keys after another. The backward pass computes the tanh again, which is faster than
to store and load it.
"""

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import ONE, REASSOCIATED, ZERO, hyperbolic_tangent


class AdditiveArguments(Arguments):
    """The count of matrices taken so far; the numbers of matrices, queries, keys and entries of each; addresses of arrays."""

    _fields_ = integer_fields("taken units queries keys width q k weight scores dq dk dweight")


FIELDS = np.dtype(AdditiveArguments)


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def score_pair(q, k, weight):
    """Compute Σ weight tanh(q + k) of one query and one key."""
    total = ZERO
    for n in range(len(weight)):
        total += weight[n] * hyperbolic_tangent(q[n] + k[n])
    return total


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def accumulate_pair_gradients(q, k, weight, slope, dq, dk, dweight):
    """Add the gradients from one score's slope to those of its query, its key and the weight."""
    for n in range(len(weight)):
        t = hyperbolic_tangent(q[n] + k[n])
        rise = slope * weight[n] * (ONE - t * t)
        dq[n] += rise
        dk[n] += rise
        dweight[n] += slope * t


@njit_inlined()
def read_arrays(arguments):
    """Return the arrays that both passes use: q, k, the weight, and the scores or their slopes."""
    units, queries, keys, n = arguments.units, arguments.queries, arguments.keys, arguments.width
    return (
        view_array(arguments.q, (units, queries, n), np.float32),
        view_array(arguments.k, (units, keys, n), np.float32),
        view_array(arguments.weight, n, np.float32),
        view_array(arguments.scores, (units, queries, keys), np.float32),
    )


@callback_with_cache(AdditiveArguments)
def compute_scores(place):
    """Compute the scores."""
    q, k, weight, scores = read_arrays(view_array(place, 1, FIELDS)[0])
    while True:
        unit = atomic_increment(place)
        if unit >= len(q):
            return
        for i in range(q.shape[1]):
            for j in range(k.shape[1]):
                scores[unit, i, j] = score_pair(q[unit, i], k[unit, j], weight)


@callback_with_cache(AdditiveArguments)
def compute_gradients(place):
    """Add the gradients of q and k, and that of the weight, a row for each matrix, to arrays that start as zeros."""
    arguments = view_array(place, 1, FIELDS)[0]
    q, k, weight, slopes = read_arrays(arguments)
    dq, dk = view_array(arguments.dq, q.shape, np.float32), view_array(arguments.dk, k.shape, np.float32)
    dweight = view_array(arguments.dweight, (q.shape[0], q.shape[2]), np.float32)
    while True:
        unit = atomic_increment(place)
        if unit >= len(q):
            return
        for i in range(q.shape[1]):
            for j in range(k.shape[1]):
                slope = slopes[unit, i, j]
                if slope != ZERO:  # 0 for a hidden key
                    accumulate_pair_gradients(q[unit, i], k[unit, j], weight, slope, dq[unit, i], dk[unit, j], dweight[unit])
