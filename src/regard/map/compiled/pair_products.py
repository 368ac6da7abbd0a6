# mypy: ignore-errors
"""Dot products of single pairs of a query and a key, compiled by numba."""

import numpy as np

from regard.compiled.intrinsics import atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import dot

BLOCK = 4096  # pairs that a thread takes at a time
BYTES = 4  # of a number


class PairArguments(Arguments):
    """The blocks of pairs taken so far; the sizes; the strides of rows of q and k; the addresses of the arrays."""

    _fields_ = integer_fields("taken count width q_stride k_stride q k queries keys products")


FIELDS = np.dtype(PairArguments)


@callback_with_cache(PairArguments)
def multiply_pairs(place):
    """Compute the products (count,) of the rows `queries` (count,) of q with the rows `keys` (count,) of k."""
    a = view_array(place, 1, FIELDS)[0]
    queries, keys = view_array(a.queries, a.count, np.int64), view_array(a.keys, a.count, np.int64)
    products = view_array(a.products, a.count, np.float32)
    while True:
        first = atomic_increment(place) * BLOCK
        if first >= a.count:
            return
        for i in range(first, min(first + BLOCK, a.count)):
            q = view_array(a.q + BYTES * a.q_stride * queries[i], a.width, np.float32)
            k = view_array(a.k + BYTES * a.k_stride * keys[i], a.width, np.float32)
            products[i] = dot(q, k)
