# mypy: ignore-errors
"""The passes over a matrix, compiled by numba; each processes the blocks of rows of one part, for one thread."""

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import atomic_increment, cast_to_pointer
from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, find_maximum, find_minimum, multiply_tile
from regard.compiled.vectors import (
    ONE,
    ZERO,
    add_four_rows,
    add_scaled_row,
    exponentiate_with_sums,
    fold_signed_row,
    sum_cut,
    sum_visible,
    sum_weighted,
)
from regard.map.compiled.blocks import (
    CHUNK,
    STRIDE,
    allocate_buffers,
    allocate_plane,
    compute_softmax,
    get_weight,
    load_plane,
    multiply_chunk,
    score_chunk,
    split_keys,
)
from regard.map.compiled.picture_rows import find_bin, flush_maxima, flush_sums, has_pairs, pool_block

SLICE = 1024  # keys of a slice: its sums stay in the L1 cache


@njit_with_cache()
def overview(plan, packed, blocks, planes, taken, parts, lines, edges, found, received, total, most, means):
    """Compute all statistics of an overview and its picture, of matrices each in `parts`: take one part after another.

    taken is the address of the number of parts taken so far. found (n, NAMES, rows), received (n, parts, k); of the picture,
    whose bins have the edges `lines` and `edges`, the sums, `total`, or the means, and the maxima `most`, (n, bins, bins). One
    of total and means is empty. Sums and maxima are raised; with means, of a plan that has all rows, they are not read.
    """
    buffers, (left, panels) = allocate_buffers(plan), allocate_plane(planes, packed)
    room = np.zeros(CHUNK, np.float32), np.zeros(CHUNK, np.float32)
    sums, none, is_paired = np.zeros((1, len(edges) - 1)), np.zeros((0, 0), np.float32), has_pairs(edges)
    while True:
        item = atomic_increment(cast_to_pointer(taken))
        if item >= len(planes.lines) * parts:
            return
        place, part = item // parts, item % parts
        unit, scores = planes.lines[place, 0], load_plane(planes, place, packed, left, panels)
        own_sums, own_means = total[unit] if len(total) else sums, means[unit] if len(means) else none
        picture = lines, edges, is_paired, own_sums, most[unit], own_means
        for group, run, row, stop in blocks:
            if group % parts != part:
                continue
            count = compute_softmax(plan, scores, run, row, stop, buffers, found[unit])
            for i in range(row, stop):
                own = scores.position + i
                found[unit, 6, i] = get_weight(0, i - row, count, buffers)
                found[unit, 7, i] = get_weight(own, i - row, count, buffers)
                found[unit, 8, i] = get_weight(own - 1, i - row, count, buffers)
            pool_block(row, stop, count, buffers, picture, received[unit, part], room)


@njit_with_cache()
def picture(plan, scores, blocks, lines, edges, below, received, total, most):
    """Compute only the picture of some blocks, from known shifts and totals (2, rows)."""
    buffers = allocate_buffers(plan)
    room = np.zeros(CHUNK, np.float32), np.zeros(CHUNK, np.float32)
    bins = lines, edges, has_pairs(edges), total, most, most[:0]
    for _, run, row, stop in blocks:
        count = split_keys(plan, run, row, stop, buffers.keys)
        for c in range(count):
            score_chunk(plan, scores, run, row, stop, c, buffers)
            for r in range(stop - row):
                exponentiate_with_sums(buffers.e[c, r, : buffers.keys[c, 2]], below[0, row + r])
                buffers.factors[c, r] = 1 / below[1, row + r] if below[1, row + r] != 0 else ZERO
        pool_block(row, stop, count, buffers, bins, received, room)


@njit_with_cache()
def attribution(plan, scores, blocks, products, lines, edges, found, sums, extremes, received, total, most, least):
    """Compute the sums and the picture of the entries of an attribution map in some blocks.

    sums (rows,); extremes (2, rows), the largest entry of each row and the largest of -entry; least is the picture of the
    latter, as `most` is of the former. The statistics of the weights go to `found`, of an unweighted map none.
    """
    buffers, entries = allocate_buffers(plan), np.empty((plan.rows, STRIDE), np.float32)
    summed, largest, lowest = np.zeros(CHUNK, np.float32), np.zeros(CHUNK, np.float32), np.zeros(CHUNK, np.float32)
    for _, run, row, stop in blocks:
        if products.is_weighted:
            count = compute_softmax(plan, scores, run, row, stop, buffers, found)
        else:
            count = split_keys(plan, run, row, stop, buffers.keys)
        for c in range(count):
            if not products.is_weighted:
                score_chunk(plan, scores, run, row, stop, c, buffers)
            multiply_chunk(products, row, stop, buffers.keys[c], entries)
            first, length, full = buffers.keys[c]
            for r in range(stop - row):
                sums[row + r] += compute_entries(
                    products, row + r, buffers.e[c, r, :full], buffers.factors[c, r], entries[r, :full]
                )
                extremes[0, row + r] = max(extremes[0, row + r], find_maximum(entries, r * STRIDE, full))
                extremes[1, row + r] = max(extremes[1, row + r], -find_minimum(entries, r * STRIDE, full))
            start = row
            while start < stop:
                own, end = find_bin(lines, start, stop)
                for r in range(start - row, end - row):
                    fold_signed_row(entries[r, :full], summed, largest, lowest)
                flush_sums(first, summed[:length], edges, received, total[own])
                flush_maxima(first, largest[:length], edges, most[own])
                flush_maxima(first, lowest[:length], edges, least[own])
                start = end


@njit_inlined()
def compute_entries(products, row, e, factor, s):
    """Turn the products s of a row into entries of the map, in place, given its scores or exponentials; return their sum."""
    if not products.is_weighted:
        return sum_visible(s, e)
    if len(products.means):
        return sum_cut(s, e, factor, products.means[row])
    return sum_weighted(s, e, factor)


@njit_with_cache()
def top(plan, packed, blocks, planes, taken, parts, found, values, keys):
    """Find the largest weights of each row of matrices and their keys, (n, rows, most), largest first: as `overview` does."""
    buffers, (left, panels) = allocate_buffers(plan), allocate_plane(planes, packed)
    while True:
        item = atomic_increment(cast_to_pointer(taken))
        if item >= len(planes.lines) * parts:
            return
        place, part = item // parts, item % parts
        unit, scores = planes.lines[place, 0], load_plane(planes, place, packed, left, panels)
        for group, run, row, stop in blocks:
            if group % parts != part:
                continue
            count = compute_softmax(plan, scores, run, row, stop, buffers, found[unit])
            for i in range(row, stop):
                select_top(plan, i - row, count, buffers, values[unit, i], keys[unit, i])


@njit_inlined()
def select_top(plan, r, count, buffers, values, keys):
    """Find the largest weights of a row of a block, filled up with keys of weight 0 if the row has too few."""
    held, n = 0, len(values)
    for c in range(count):
        first, length, full = buffers.keys[c]
        factor = buffers.factors[c, r]
        for j in range(0, full, COLUMNS):
            if held == n and not find_maximum(buffers.e, (c * plan.rows + r) * STRIDE + j, COLUMNS) * factor > values[n - 1]:
                continue
            for i in range(j, min(j + COLUMNS, length)):
                weight = buffers.e[c, r, i] * factor
                if held < n or weight > values[n - 1]:
                    held = min(held + 1, n)
                    place = held - 1
                    while place > 0 and values[place - 1] < weight:
                        values[place], keys[place] = values[place - 1], keys[place - 1]
                        place -= 1
                    values[place], keys[place] = weight, first + i
    key = 0
    while held < n:  # keys that no chunk holds
        if not np.any(keys[:held] == key):
            values[held], keys[held] = ZERO, key
            held += 1
        key += 1


@njit_with_cache()
def forward(plan, scores, blocks, found, v, out, until, received):
    """Compute A v: v as panels (n, k, COLUMNS), out (rows, n COLUMNS).

    The weights of the rows before `until` are summed to `received` (k,).
    """
    buffers, some = allocate_buffers(plan), np.empty((ROWS, COLUMNS), np.float32)
    summed = np.zeros(CHUNK, np.float32)
    for _, run, row, stop in blocks:
        count = compute_softmax(plan, scores, run, row, stop, buffers, found)
        for c in range(count):
            first, length, _ = buffers.keys[c]
            if row < until:
                sum_columns(buffers.e[c], buffers.factors[c], min(stop, until) - row, summed[:length], received[first:])
            for panel in range(len(v)):
                start = (panel * v.shape[1] + first) * COLUMNS
                for r in range(0, stop - row, ROWS):
                    multiply_tile(buffers.e, (c * plan.rows + r) * STRIDE, STRIDE, 1, v, start, length, some, 0, COLUMNS)
                    for i in range(r, min(r + ROWS, stop - row)):
                        add_scaled_row(
                            some[i - r], buffers.factors[c, i], out[row + i, panel * COLUMNS : (panel + 1) * COLUMNS]
                        )


@njit_inlined()
def sum_columns(e, factors, rows, summed, received):
    """Add the weights of some rows on some keys to `received`; summed is zero before and after."""
    for r in range(rows):
        add_scaled_row(e[r, : len(summed)], factors[r], summed)
    for j in range(len(summed)):
        received[j] += summed[j]
    summed[:] = ZERO


@njit_with_cache()
def backward(plan, scores, blocks, found, x, out):
    """Compute Aᵀ x: x (rows, n COLUMNS), out (k rounded up to full panels, n COLUMNS)."""
    buffers, some = allocate_buffers(plan), np.empty((ROWS, COLUMNS), np.float32)
    weighed = np.empty((plan.rows, COLUMNS), np.float32)
    for _, run, row, stop in blocks:
        count = compute_softmax(plan, scores, run, row, stop, buffers, found)
        for c in range(count):
            first, _, full = buffers.keys[c]
            for start in range(0, x.shape[1], COLUMNS):
                for r in range(stop - row):
                    for e in range(COLUMNS):
                        weighed[r, e] = x[row + r, start + e] * buffers.factors[c, r]
                for j in range(0, full, ROWS):
                    multiply_tile(buffers.e, c * plan.rows * STRIDE + j, 1, STRIDE, weighed, 0, stop - row, some, 0, COLUMNS)
                    for i in range(ROWS):
                        add_scaled_row(some[i], ONE, out[first + j + i, start : start + COLUMNS])


@njit_with_cache()
def backward_few(plan, scores, blocks, found, x, out):
    """Compute Aᵀ x for few columns: x (rows, n), out (n, k rounded up to full panels). Sums are along rows of keys."""
    buffers, weighed = allocate_buffers(plan), np.empty((plan.rows, x.shape[1]), np.float32)
    summed = np.zeros(SLICE, np.float32)
    for _, run, row, stop in blocks:
        count = compute_softmax(plan, scores, run, row, stop, buffers, found)
        for c in range(count):
            first, _, full = buffers.keys[c]
            for r in range(stop - row):
                for column in range(x.shape[1]):
                    weighed[r, column] = x[row + r, column] * buffers.factors[c, r]
            for start in range(0, full, SLICE):
                length = min(SLICE, full - start)
                for column in range(x.shape[1]):
                    some = summed[:length]
                    sum_rows(buffers.e[c], start, weighed[: stop - row, column], some)
                    add_scaled_row(some, ONE, out[column, first + start : first + start + length])
                    some[:] = ZERO


@njit_inlined()
def sum_rows(e, start, factors, summed):
    """Add rows from a key on, each times its factor, to `summed`. A slice of e would not be known to be contiguous."""
    r, rows, end = 0, len(factors), start + len(summed)
    while r + 4 <= rows:
        four = factors[r], factors[r + 1], factors[r + 2], factors[r + 3]
        add_four_rows(e[r, start:end], e[r + 1, start:end], e[r + 2, start:end], e[r + 3, start:end], four, summed)
        r += 4
    while r < rows:
        add_scaled_row(e[r, start:end], factors[r], summed)
        r += 1
