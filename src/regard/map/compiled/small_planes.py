# mypy: ignore-errors
"""The weights and all statistics of small matrices, compiled by numba: a thread takes one matrix after another.

A matrix is scored and put through the softmax in the L1 cache, and only what is asked for goes to memory.
"""

import ctypes

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import FAR, atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, find_maximum, multiply_tile
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import (
    LEAST,
    ONE,
    REASSOCIATED,
    ZERO,
    add_bias,
    cap_scores,
    exponentiate_with_sums,
    hide_scores,
    scale_row,
)
from regard.map.compiled import score_means, weight_sums
from regard.map.compiled.blocks import load_keys, load_queries, write_statistics


class PlaneArguments(Arguments):
    """The count of matrices taken so far; the sizes; the strides of batch, heads and rows; the addresses of the arrays.

    strides are those of q, k, the bias and the mask's table; pairs (units, 2) are batch rows and heads. table_strides are those
    of batch and heads of counted, real and heavy_counts, and of batch, heads and rows of visible.
    """

    _fields_ = [  # noqa: RUF012  # as ctypes has it
        *integer_fields("taken units heads share queries keys width statistics window"),
        ("strides", ctypes.c_int64 * 12),
        ("table_strides", ctypes.c_int64 * 9),
        *integer_fields("pairs positions q k bias seen sinks weights found received"),
        *integer_fields("counted visible real heavy_counts firsts has_shared_pairs"),
        *integer_fields("by_query numbers is_stripe mean_count"),
        *integer_fields("has_nan has_blind_query"),  # of any matrix, set by the loop
        ("smallest", ctypes.c_double),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("sink", ctypes.c_float),
    ]


FIELDS = np.dtype(PlaneArguments)
NOWHERE = np.int64(-(2**62))  # a position that no query has


@callback_with_cache(PlaneArguments)
def summarize_planes(place):
    """Compute the weights (units, q, k), the statistics of `compiled_passes.NAMES`, (names, units, q), and the column sums.

    softcap is 0 for none; bias, seen, sinks, weights and the sums of weights are absent if their address is 0.
    """
    a = view_array(place, 1, FIELDS)[0]
    q, k, width, strides = a.queries, a.keys, a.width, a.strides
    pairs, positions = view_array(a.pairs, (a.units, 2), np.int64), view_array(a.positions, a.units, np.int64)
    sinks, bias, seen = (
        view_array(a.sinks, FAR, np.float32),
        view_array(a.bias, FAR, np.float32),
        view_array(a.seen, FAR, np.bool_),
    )
    weights = view_array(a.weights, (a.units, q, k), np.float32)
    found = view_array(a.found, (a.statistics, a.units, q), np.float32)
    received = view_array(a.received, (a.units, k), np.float32)
    rows, columns = -(-q // ROWS) * ROWS, -(-k // COLUMNS) * COLUMNS
    left, panels = np.zeros(rows * width, np.float32), np.zeros((columns // COLUMNS, width, COLUMNS), np.float32)
    scores, summed = np.empty((rows, columns), np.float32), np.empty(columns)
    tops, shifts, factors = np.empty(q, np.float32), np.empty(q, np.float32), np.empty(q, np.float32)
    width_skewed = -(-(q + columns) // COLUMNS) * COLUMNS
    sums, band, distances = np.empty((q, 3)), np.empty(q + columns, np.float32), np.empty(width_skewed)
    skewed, counts = np.zeros((-(-q // 4) * 4, width_skewed), np.float32), np.empty(q + k - 1)
    seen_counts, means = np.empty((3, q), np.int64), np.empty((3, a.mean_count))
    counted_from = NOWHERE  # the position for which seen_counts are
    if a.has_shared_pairs:
        every = view_array(a.counted, q, np.bool_)
        weight_sums.count_by_distance(view_array(a.visible, FAR, np.bool_), 0, a.table_strides[8], every, counts)
    while True:
        unit = atomic_increment(place)
        if unit >= a.units:
            return
        b, h = pairs[unit]
        queries, keys = b * strides[0] + h * strides[1], b * strides[3] + h // a.share * strides[4]
        load_queries(view_array(a.q, FAR, np.float32), queries, strides[2], 1, a.scale, left, q, width)
        load_keys(view_array(a.k, FAR, np.float32), keys, strides[5], 1, ONE, panels, k)
        for j in range(0, columns, COLUMNS):
            for i in range(0, rows, ROWS):
                multiply_tile(left, i * width, width, 1, panels, j * width, width, scores, i * columns + j, columns)
        sink = sinks[h] if len(sinks) else LEAST
        for i in range(q):  # one step for all rows, then the next: those of different rows do not wait for each other
            row = scores[i]
            if a.softcap > 0:
                cap_scores(row[:k], a.softcap)
            if len(bias):
                at = b * strides[6] + h * strides[7] + i * strides[8]
                add_bias(row[:k], bias[at : at + k])
            if len(seen):
                at = b * strides[9] + h * strides[10] + i * strides[11]
                hide_scores(row[:k], seen[at : at + k])
            row[k:] = LEAST
        for i in range(q):
            tops[i] = find_maximum(scores, i * columns, columns)
            shift = max(tops[i], sink)
            shifts[i] = shift if shift > LEAST else ZERO  # a row that sees nothing
        for i in range(q):
            sums[i, 0], sums[i, 1], sums[i, 2] = exponentiate_with_sums(scores[i], shifts[i])
        for i in range(q):
            mine = found[:, unit, i], tops[i], shifts[i], sink, positions[unit] + i
            factors[i] = write_statistics(*mine, sums[i, 0], sums[i, 1], sums[i, 2])
            if not (np.isfinite(found[0, unit, i]) and np.isfinite(found[1, unit, i])):
                a.has_nan = 1
            elif found[4, unit, i] == 0:
                a.has_blind_query = 1
        scale_and_sum_rows(scores, factors, q, summed)
        for i in range(q):
            for name, key in ((6, 0), (7, positions[unit] + i), (8, positions[unit] + i - 1)):
                found[name, unit, i] = scores[i, key] if 0 <= key < k else ZERO
            if len(weights):
                scale_row(scores[i, :k], ONE, weights[unit, i])
        scale_row(summed[:k], ONE, received[unit])
        if a.numbers:
            if not a.has_shared_pairs or positions[unit] != counted_from:
                counted_from = positions[unit]
                at = unit // a.heads * a.table_strides[6] + unit % a.heads * a.table_strides[7]
                table = view_array(a.visible, FAR, np.bool_), at, a.table_strides[8]
                score_means.count_seen_keys(*table, k, counted_from, a.window, seen_counts)
            room = band, skewed, distances, counts, seen_counts, means
            sum_weights(a, unit, scores[:q], positions[unit], received[unit], found[:, unit], room)


@njit_inlined()
def sum_weights(a, unit, rows, position, received, found, room):
    """Compute what `weight_sums.WeightSums` holds of one matrix, whose weights are rows (q, n) with 0 after the last key.

    `found` are the statistics of its rows. room is band (q + n,), skewed (q + n columns), distances (q + n,), counts
    (q + k - 1,), seen_counts (3, q) and means (3, MEANS).
    """
    band, skewed, distances, counts, seen_counts, means = room
    q, k, strides = a.queries, a.keys, a.table_strides
    b, h = unit // a.heads, unit % a.heads
    at = b * strides[0] + h * strides[1]
    counted = view_array(a.counted, FAR, np.bool_)[at : at + q]
    at = b * strides[2] + h * strides[3]
    real = view_array(a.real, FAR, np.bool_)[at : at + k]
    count = view_array(a.heavy_counts, FAR, np.int64)[b * strides[4] + h * strides[5]]
    visible, at = view_array(a.visible, FAR, np.bool_), b * strides[6] + h * strides[7]
    by_query = view_array(a.by_query, (2, a.units, q), np.float32)
    near, stripes = by_query[0, unit], by_query[1, unit]
    numbers = view_array(a.numbers, (2 + 3 * a.mean_count, a.units), np.float64)[:, unit]
    is_stripe = view_array(a.is_stripe, (a.units, k), np.bool_)[unit]
    first = view_array(a.firsts, a.units, np.int64)[b]
    weight_sums.sum_near(rows, position, a.window, band, near)
    if not counted.all():
        received = weight_sums.sum_counted(rows, counted, k)
    marked = band[: rows.shape[1]]
    numbers[0] = weight_sums.find_heavy(received, real, first, count, marked, is_stripe)
    for j in range(k):
        marked[j] = is_stripe[j]
    marked[k:] = 0
    weight_sums.sum_marked(rows, marked, stripes)
    weight_sums.skew_rows(rows, counted, skewed)
    squares = weight_sums.sum_columns_and_squares(skewed, distances)
    if not a.has_shared_pairs:
        weight_sums.count_by_distance(visible, at, strides[8], counted, counts)
    numbers[1] = weight_sums.explain_by_distance(distances, counts, squares, a.smallest)
    score_means.count_common_keys(visible, at, strides[8], is_stripe, seen_counts[2])
    table, query = (visible, at, strides[8], k, seen_counts, counted), (position, first, a.sink)
    score_means.average_scores(rows, found, (near, stripes), table, query, means)
    numbers[2:] = means.ravel()


@njit_inlined()
def scale_and_sum_rows(rows, factors, count, summed):
    """Multiply the first `count` rows by a factor each, in place, and set `summed` to their sums."""
    summed[:] = 0
    fours = count - count % 4
    for i in range(0, fours, 4):
        scale_four_rows(rows[i], rows[i + 1], rows[i + 2], rows[i + 3], factors[i : i + 4], summed)
    for i in range(fours, count):
        scale_and_add(rows[i], factors[i], summed)


@njit_inlined(fastmath=REASSOCIATED)
def scale_four_rows(s, t, u, v, factors, summed):
    """Do as `scale_and_add` for four rows at once, reading and writing `summed` a quarter as often."""
    f, g, h, i = factors[0], factors[1], factors[2], factors[3]
    for j in range(len(s)):
        s[j] *= f
        t[j] *= g
        u[j] *= h
        v[j] *= i
        summed[j] += (s[j] + t[j]) + (u[j] + v[j])


@njit_inlined(fastmath=REASSOCIATED)
def scale_and_add(e, factor, summed):
    """Multiply e by a factor in place, and add it to `summed`."""
    for j in range(len(e)):
        e[j] *= factor
        summed[j] += e[j]
