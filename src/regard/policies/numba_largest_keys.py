# mypy: ignore-errors
"""The keys with the largest scores of each query, compiled by numba: unsorted, so that any number of them takes two passes."""

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, multiply_tile
from regard.compiled.vectors import REASSOCIATED

BINS = 512
SMALLEST_RANGE, LARGEST_RANGE = np.float32(1e-30), np.float32(1e38)  # whose quotients with BINS are finite


@njit_inlined(fastmath=REASSOCIATED)
def number_bins(s, numbers):
    """Write the bin of each of the numbers s, from the smallest to the largest; return False if their range has no bins."""
    low, high = s[0], s[0]
    for j in range(len(s)):
        low, high = min(low, s[j]), max(high, s[j])
    if not SMALLEST_RANGE < high - low < LARGEST_RANGE:
        return False
    factor = np.float32(BINS - 1) / (high - low)
    for j in range(len(s)):
        numbers[j] = np.int32((s[j] - low) * factor)
    return True


@njit_inlined()
def pick_largest(s, first, found, numbers, rest):
    """Write the indices, from `first` on, of the len(found) largest numbers of s; where s has fewer, the last one repeats.

    numbers and rest are buffers for as many int32 as s has numbers.
    """
    n, most = len(s), len(found)
    if n <= most:
        for j in range(most):
            found[j] = first + min(j, n - 1)
        return
    numbers[:n] = 0
    counts = np.zeros(BINS, np.int32)
    if number_bins(s, numbers):
        for j in range(n):
            counts[min(numbers[j], BINS - 1)] += 1
    else:
        counts[0] = n  # one bin for all
    last, above = BINS - 1, 0  # the bin in which the smallest one of the largest lies, and how many lie above it
    while above + counts[last] < most:
        above += counts[last]
        last -= 1
    count, waiting = 0, 0
    for j in range(n):
        if numbers[j] > last:
            found[count] = first + j
            count += 1
        elif numbers[j] == last:
            rest[waiting] = j
            waiting += 1
    places = rest[:waiting]
    limit = np.partition(s[places], waiting - (most - count))[waiting - (most - count)]
    for j in places:
        if s[j] > limit:
            found[count] = first + j
            count += 1
    for j in places:
        if count == most:
            break
        if s[j] == limit:
            found[count] = first + j
            count += 1


@njit_with_cache()
def find_largest_keys(q, panels, lows, stops, origin, first, last, found):
    """Write the keys with the largest scores of the queries first to last to found (t - origin, n) int32.

    The first row is of the query `origin`. q (t, d), scaled; panels (k / COLUMNS, d, COLUMNS) of the keys. Query i sees the
    keys from lows[i] to stops[i].
    """
    depth, width = q.shape[1], len(panels) * COLUMNS
    some, s = np.zeros((ROWS, depth), np.float32), np.empty((ROWS, width), np.float32)
    numbers, rest = np.empty(width, np.int32), np.empty(width, np.int32)
    for row in range(first, last, ROWS):
        end = min(row + ROWS, last)
        some[: end - row] = q[row:end]
        for j in range(lows[row] // COLUMNS * COLUMNS, stops[end - 1], COLUMNS):
            multiply_tile(some, 0, depth, 1, panels, j * depth, depth, s, j, width)
        for i in range(row, end):
            pick_largest(s[i - row, lows[i] : stops[i]], lows[i], found[i - origin], numbers, rest)
