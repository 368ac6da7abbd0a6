# mypy: ignore-errors
"""All statistics of many small matrices, from their scores, compiled by numba."""

import numpy as np
from numba import njit

from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.register_tiles import COLUMNS, find_maximum
from regard.compiled.vectors import LEAST, REASSOCIATED, ZERO, exponentiate_with_sums
from regard.map.compiled.blocks import write_statistics


@njit_with_cache()
def summarize_planes(weights, sinks, positions, part, parts, found, received):
    """Turn scores (n, q, k) into weights in place, for one of several parts of the planes.

    `sinks` and `positions` (n,) are each plane's sink, -inf for none, and its first query's position. The statistics go to
    `found` (NAMES, n, q), in the order of `compiled_passes.NAMES`, and the sum of each column to `received` (n, k). Rows are
    padded to whole vectors: what is left of a loop otherwise goes one number at a time.
    """
    n, q, k = weights.shape
    summed, buffer = np.empty(k), np.full(-(-k // COLUMNS) * COLUMNS, LEAST, np.float32)
    for plane in range(n * part // parts, n * (part + 1) // parts):
        summed[:] = 0
        for i in range(q):
            buffer[:k] = weights[plane, i]
            inverse = summarize_row(buffer, sinks[plane], positions[plane] + i, found[:, plane, i])
            scale_and_add(buffer[:k], inverse, weights[plane, i], summed)
            buffer[k:] = LEAST
            for name, key in ((6, 0), (7, positions[plane] + i), (8, positions[plane] + i - 1)):
                found[name, plane, i] = weights[plane, i, key] if 0 <= key < k else ZERO
        received[plane] = summed


@njit(nogil=True)
def summarize_row(s, sink, position, found):
    """Exponentiate the scores s of a row in place, padded with -inf, and write its statistics; return 1 / their sum."""
    top = find_maximum(s, 0, len(s))
    shift = max(top, sink)
    shift = shift if shift > LEAST else ZERO  # a row that sees nothing
    alone, weighted, place = exponentiate_with_sums(s, shift)
    sums = np.float64(alone), np.float64(weighted), np.float64(place)
    return np.float32(write_statistics(found, top, shift, sink, position, *sums))


@njit(fastmath=REASSOCIATED, nogil=True)
def scale_and_add(e, factor, out, summed):
    """Set `out` to e times a factor, and add it to `summed`."""
    for j in range(len(e)):
        out[j] = e[j] * factor
        summed[j] += out[j]
