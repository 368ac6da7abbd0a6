# mypy: ignore-errors
"""Weights of blocks of rows, added to the rows of a picture, to their means and to the sums of columns, compiled by numba."""

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.vectors import REASSOCIATED, ZERO, fold_four_rows, fold_row


@njit_inlined()
def find_first_bin(first, edges):
    """Return the bin of the first key from `first` on that is in one, and that key's distance from `first`."""
    if first <= edges[0]:
        return 0, edges[0] - first
    return np.searchsorted(edges, first, side="right") - 1, 0


@njit_inlined()
def has_pairs(edges):
    """Return whether each bin holds two keys, and the first bin the first two."""
    return (edges == 2 * np.arange(len(edges))).all()


@njit_inlined(fastmath=REASSOCIATED)
def add_pairs(x, out):
    """Add each pair of numbers to one number of out."""
    for p in range(len(out)):
        at = np.uint64(p) << np.uint64(1)  # unsigned: an index that may be negative prevents vectorization
        out[p] += x[at] + x[at + np.uint64(1)]


@njit_inlined()
def raise_to_pairs(x, out):
    """Raise each number of out to at least the two of a pair."""
    for p in range(len(out)):
        at = np.uint64(p) << np.uint64(1)
        out[p] = max(out[p], max(x[at], x[at + np.uint64(1)]))


@njit_inlined(fastmath=REASSOCIATED)
def add_row(x, out):
    """Add x to out."""
    for j in range(len(x)):
        out[j] += x[j]


@njit_inlined(fastmath=REASSOCIATED)
def flush_sums(first, summed, edges, received, total):
    """Add the sums of some keys, from `first` on, to the columns and to a row of the picture; then reset them."""
    add_row(summed, received[first : first + len(summed)])
    part, j = find_first_bin(first, edges)
    while j < len(summed) and part < len(edges) - 1:
        end, a = min(edges[part + 1] - first, len(summed)), ZERO
        for i in range(j, end):
            a += summed[i]
        total[part] += a
        j, part = end, part + 1
    summed[:] = ZERO


@njit_inlined()
def flush_maxima(first, largest, edges, most):
    """Raise a row of the picture to at least the maxima of some keys, from `first` on; then reset them."""
    part, j = find_first_bin(first, edges)
    while j < len(largest) and part < len(edges) - 1:
        end, a = min(edges[part + 1] - first, len(largest)), ZERO
        for i in range(j, end):
            a = max(a, largest[i])
        most[part] = max(most[part], a)
        j, part = end, part + 1
    largest[:] = ZERO


@njit_inlined(error_model="numpy")
def pool_block(row, stop, count, buffers, picture, received, room):
    """Add a block's weights to the column sums and, one bin of rows after the other, to the picture.

    picture has the edges of the bins, and the sums, maxima and means of one matrix, as `overview` has of several.
    """
    lines, edges, is_paired, total, most, means = picture
    summed, largest = room
    start = row
    while start < stop:
        own, end = find_bin(lines, start, stop)
        sums = total[own % len(total)]
        if len(means) and start == lines[own]:
            most[own] = ZERO
        for c in range(count):
            first, length, full = buffers.keys[c]
            add_rows(buffers.e[c], buffers.factors[c], start - row, end - row, summed[:full], largest[:full])
            if is_paired:  # numbers after the last key are 0
                add_row(summed[:length], received[first : first + length])
                add_pairs(summed, sums[first // 2 : (first + full) // 2])
                raise_to_pairs(largest, most[own, first // 2 : (first + full) // 2])
                summed[:full] = ZERO
                largest[:full] = ZERO
            else:
                flush_sums(first, summed[:length], edges, received, sums)
                flush_maxima(first, largest[:length], edges, most[own])
        if len(means) and end == lines[own + 1]:
            average_sums(sums, end - lines[own], edges, means[own])
        start = end


@njit_inlined()
def find_bin(lines, row, stop):
    """Return the bin of a row, of bins of at least one row with these edges, and the end of its rows before `stop`."""
    own = np.searchsorted(lines, row, side="right") - 1
    return own, min(lines[own + 1], stop)


@njit_inlined(error_model="numpy")
def average_sums(sums, rows, edges, means):
    """Set a row of a picture to the means of its bins, which have `rows` rows each, and reset their sums."""
    starts, stops = edges[:-1], edges[1:]
    for j in range(len(means)):
        means[j] = sums[j] / max(rows * (stops[j] - starts[j]), 1)
    sums[:] = 0


@njit_inlined()
def add_rows(e, factors, r, end, summed, largest):
    """Add the weights of the rows r to end to `summed`, and take their maximum into `largest`."""
    n = len(summed)
    while r + 4 <= end:
        four = factors[r], factors[r + 1], factors[r + 2], factors[r + 3]
        fold_four_rows(e[r, :n], e[r + 1, :n], e[r + 2, :n], e[r + 3, :n], four, summed, largest)
        r += 4
    while r < end:
        fold_row(e[r, :n], factors[r], summed, largest)
        r += 1
