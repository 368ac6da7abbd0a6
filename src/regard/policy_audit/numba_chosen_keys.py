# mypy: ignore-errors
"""The softmax of each query over keys that are chosen for it, compiled by numba: pages of keys, or columns and diagonals."""

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, find_maximum, multiply_tile
from regard.compiled.vectors import LEAST, ZERO, add_scaled_row, cap_scores, dot, exponentiate_with_sums
from regard.policy_audit.numba_kept_rows import BLOCK, sum_distances


@njit_inlined()
def attend_to_keys(q, k, v, keys, count, row, softcap, s, shift, total, distance, context):
    """Compute the softmax of the query at position `row` over the first `count` of some keys; s is a buffer of scores."""
    full = -(-count // COLUMNS) * COLUMNS
    for n in range(count):
        s[n] = dot(q[row], k[keys[n]])
    if softcap > 0:
        cap_scores(s[:count], softcap)
    s[count:full] = LEAST
    top = find_maximum(s, 0, full)
    shift[row] = top if top > LEAST else ZERO
    total[row] = exponentiate_with_sums(s[:full], shift[row])[0]
    context[row] = 0
    distance[row] = 0
    if count == 0:
        return
    below = 1 / total[row]
    distance[row] = sum_distances(s[:count], keys[:count], np.int32(row)) * below
    for n in range(count):
        if s[n] > 0:
            add_scaled_row(v[keys[n]], s[n] * below, context[row])


@njit_with_cache()
def attend_to_pages(
    pages, page, rows, start, q, k, v, lows, stops, first, last, softcap, shift, total, distance, context, counts
):
    """Compute the softmax of the queries first to last over the keys of their pages.

    pages (lines, n) int32, a line for every `rows` queries from `start` on, each page of `page` keys. q (t, d), scaled,
    k (t, d), v (t, e). A query sees keys from lows[i] to stops[i] only. Written are the denominators, shift and total (t,), the
    mean distances (t,), the contexts (t, e), and the numbers of keys, counts (t,).
    """
    t = len(k)
    marks = np.full(t // page + 1, -1, np.int64)  # the last query that read a page: one that stands twice is read once
    most = pages.shape[1] * page
    keys, s = np.empty(most, np.int32), np.empty(most + COLUMNS, np.float32)
    for i in range(first, last):
        line, count = (i - start) // rows, 0
        for n in range(pages.shape[1]):
            number = pages[line, n]
            if number >= len(marks) or marks[number] == i:
                continue
            marks[number] = i
            for j in range(max(number * page, lows[i]), min((number + 1) * page, stops[i])):
                keys[count] = j
                count += 1
        counts[i] = count
        attend_to_keys(q, k, v, keys, count, i, softcap, s, shift, total, distance, context)


@njit_inlined()
def copy_page_scores(s, e, numbers, page, low, stop):
    """Copy the scores s of the keys of some pages, from low to stop only, to e, where others are LEAST; count the keys."""
    count = 0
    for n in range(len(numbers)):
        for j in range(max(numbers[n] * page, low), min((numbers[n] + 1) * page, stop)):
            count += e[j] == LEAST  # a page may stand twice
            e[j] = s[j]
    return count


@njit_with_cache()
def attend_to_many_pages(
    pages,
    page,
    rows,
    start,
    panels,
    values,
    q,
    k,
    v,
    lows,
    stops,
    first,
    last,
    softcap,
    shift,
    total,
    distance,
    context,
    counts,
):
    """Compute what `attend_to_pages` does, by products of blocks of queries with all keys, which is faster for many pages.

    panels (t / COLUMNS, d, COLUMNS) are the keys, values (e / COLUMNS, t, COLUMNS) the values.
    """
    depth, t, width = q.shape[1], len(k), len(panels) * COLUMNS
    some, s, e = (
        np.zeros((BLOCK, depth), np.float32),
        np.empty((BLOCK, width), np.float32),
        np.zeros((BLOCK, width), np.float32),
    )
    products, below, places = (
        np.empty((ROWS, COLUMNS), np.float32),
        np.empty(BLOCK, np.float32),
        np.arange(width).astype(np.int32),
    )
    for row in range(first, last, BLOCK):
        end = min(row + BLOCK, last)
        some[: end - row] = q[row:end]
        left, full = lows[row] // COLUMNS * COLUMNS, -(-stops[end - 1] // COLUMNS) * COLUMNS
        for n in range(left, full, COLUMNS):
            for r in range(0, end - row, ROWS):
                multiply_tile(some, r * depth, depth, 1, panels, n * depth, depth, s, r * width + n, width)
        for r in range(end - row):
            i = row + r
            if softcap > 0:
                cap_scores(s[r, left:full], softcap)
            e[r, left:full] = LEAST
            count = copy_page_scores(s[r], e[r], pages[(i - start) // rows], page, lows[i], stops[i])
            counts[i] = count
            top = find_maximum(e, r * width + left, full - left)
            shift[i] = top if top > LEAST else ZERO
            total[i] = exponentiate_with_sums(e[r, left:full], shift[i])[0]
            below[r] = 1 / total[i] if count else ZERO
            distance[i] = sum_distances(e[r, left:full], places[left:full], np.int32(i)) * below[r]
        for panel in range(len(values)):
            a, z = panel * COLUMNS, min((panel + 1) * COLUMNS, v.shape[1])
            for r in range(0, end - row, ROWS):
                at = (panel * t + left) * COLUMNS
                multiply_tile(e, r * width + left, width, 1, values, at, min(full, t) - left, products, 0, COLUMNS)
                for i in range(r, min(r + ROWS, end - row)):
                    for c in range(a, z):
                        context[row + i, c] = products[i - r, c - a] * below[i]


@njit_with_cache()
def attend_to_lines(
    columns, distances, is_column, q, k, v, lows, stops, first, last, softcap, shift, total, distance, context, counts
):
    """Compute the softmax of the queries first to last over some columns, and the keys at some distances before them.

    columns and distances are sorted, is_column (t,) marks the columns; the other arguments are those of `attend_to_pages`.
    """
    most = len(columns) + len(distances)
    keys, s = np.empty(most, np.int32), np.empty(most + COLUMNS, np.float32)
    for i in range(first, last):
        count = 0
        for j in columns:
            if j >= stops[i]:
                break
            if j >= lows[i]:
                keys[count] = j
                count += 1
        for back in distances:
            j = i - back
            if j < lows[i]:
                break
            if j < stops[i] and not is_column[j]:
                keys[count] = j
                count += 1
        counts[i] = count
        attend_to_keys(q, k, v, keys, count, i, softcap, s, shift, total, distance, context)
