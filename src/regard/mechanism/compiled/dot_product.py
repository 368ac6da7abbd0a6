# mypy: ignore-errors
"""softmax(q kᵀ / √d) v and its gradient, compiled by numba, for one contiguous key range per query.

A thread takes one key head after another, with the queries that share it: a block of queries is scored, put through the
softmax and multiplied by the values while it is in the cache. The backward pass computes the scores again, and the weights
from the saved log-sum-exp. Sums are float32 for every dtype; in bfloat16, weights and the gradients of scores are rounded to
bfloat16 before they are summed over.
"""

import ctypes
import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.compiled.bfloat16 import store_scaled_row
from regard.compiled.exponentials import fill_numbers, store_exponentials
from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import FAR, atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, accumulate_tile, find_maximum, multiply_tile
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import LEAST, ONE, ZERO
from regard.mechanism.compiled.panels import (
    allocate_column_operand,
    allocate_row_operand,
    allocate_slots,
    compute_score_gradients,
    copy_score_pairs,
    dot_stored_rows,
    load_rows,
    numbers_per_slot,
    pack_panels,
    pack_transposed_panels,
    scale_scores,
    view_numbers,
)

BLOCK = 64  # queries of a block, a multiple of ROWS
Floats = NDArray[np.float32]


class AttentionArguments(Arguments):
    """The arguments of both passes.

    The count of units of work taken so far; the sizes; the number of batch rows with key ranges of their own; the strides of
    batch, heads and tokens of q, k, v and the gradient; the addresses of the ranges and the arrays; the scale.
    """

    _fields_ = [  # noqa: RUF012  # as ctypes has it
        *integer_fields("taken b h g q_tokens k_tokens d e ranges"),
        ("strides", ctypes.c_int64 * 12),
        *integer_fields("first_keys stop_keys q k v out lse grad dq dk dv"),
        ("scale", ctypes.c_float),
    ]


FIELDS = np.dtype(AttentionArguments)


class Sizes(NamedTuple):
    """The number of batch rows, heads, key heads, queries, keys, and numbers of a key and of a value."""

    b: int
    h: int
    g: int
    q: int
    k: int
    d: int
    e: int


class BlockBuffers(NamedTuple):
    """The buffers for one block of queries."""

    rows: Any  # (BLOCK, slots of d), the queries
    scores: Floats  # (BLOCK, stride)
    low: NDArray[np.int64]  # (BLOCK / ROWS,), the first key that any query of each group of ROWS sees
    high: NDArray[np.int64]  # (BLOCK / ROWS,), the key after the last one


@njit_inlined()
def round_up_to_columns(n):
    """Round n up to a multiple of COLUMNS."""
    return -(-n // COLUMNS) * COLUMNS


@njit_inlined()
def count_slots(n, x):
    """Return the number of slots that n numbers of the dtype of x take."""
    return -(-n // numbers_per_slot(x))


@njit_inlined()
def allocate_buffers(sizes, x):
    """Allocate the buffers for a block; rows of scores are not a power of two apart, which would share one cache set."""
    groups = BLOCK // ROWS
    rows, scores = (
        allocate_slots(x, (BLOCK, count_slots(sizes.d, x))),
        np.zeros((BLOCK, round_up_to_columns(sizes.k) + COLUMNS), np.float32),
    )
    return BlockBuffers(rows, scores, np.zeros(groups, np.int64), np.zeros(groups, np.int64))


@njit_inlined()
def find_visible_range(lows, highs, first, count, room):
    """Find the keys that each group of queries sees, and those of the whole block; the first is a multiple of COLUMNS."""
    start, stop = np.int64(2**62), np.int64(0)
    for group in range(len(room.low)):
        low, high = np.int64(2**62), np.int64(0)
        for r in range(group * ROWS, min(group * ROWS + ROWS, count)):
            if lows[first + r] < highs[first + r]:
                low, high = min(low, np.int64(lows[first + r])), max(high, np.int64(highs[first + r]))
        room.low[group], room.high[group] = (low // COLUMNS * COLUMNS, high) if low < high else (0, 0)
        if low < high:
            start, stop = min(start, room.low[group]), max(stop, high)
    return (start, stop) if start < stop else (0, 0)


@njit_inlined()
def score_block(rows, panels, start, stop, out, room):
    """Multiply the rows of each group by the panels of keys that the group sees."""
    depth, stride = rows.shape[1], out.shape[1]
    for j in range(start, stop, COLUMNS):
        for group in range(len(room.low)):
            if room.low[group] <= j < room.high[group]:
                r = group * ROWS
                multiply_tile(rows, r * depth, depth, 1, panels, j * depth, depth, out, r * stride + j, stride)


@njit_inlined()
def scale_and_mask_row(s, low, high, scale):
    """Scale the scores from low to high, and set those outside to -inf."""
    s[:low] = LEAST
    scale_scores(s[low:high], scale)
    s[high:] = LEAST


@njit_inlined()
def hide_scores_outside_ranges(lows, highs, seen, start, stop, first, last, scores, numbers):
    """Set the scores of rows outside the keys that each sees to -inf, from the first to the last key of their group.

    A row that sees no key gets weights of 0 instead.
    """
    stride = scores.shape[1]
    for r in range(start, stop):
        low, high = lows[seen + r], highs[seen + r]
        if low < high:
            fill_numbers(scores, r * stride + first, low - first, LEAST)
            fill_numbers(scores, r * stride + high, last - high, LEAST)
        else:
            numbers[r, first:last] = 0


@njit_inlined()
def exponentiate_block(lows, highs, seen, count, scale, weights, factor, lse, to, room):
    """Replace the scores of a block by exponentials; store what they are to be multiplied by, and their log-sum-exp.

    The factors of rows without keys are 0, their log-sum-exp is -inf.
    """
    scores, numbers = room.scores, view_numbers(weights)
    stride = scores.shape[1]
    if scale <= ZERO:  # the largest score is then not that of the largest product
        scale_scores(scores.ravel(), scale)
        scale = ONE
    for start in range(0, count, ROWS):
        stop, group = min(start + ROWS, count), start // ROWS
        first, last = room.low[group], round_up_to_columns(room.high[group])
        # all rows of a group before the first is read: a load of what was stored in smaller pieces just before waits for them
        hide_scores_outside_ranges(lows, highs, seen, start, stop, first, last, scores, numbers)
        for r in range(start, stop):
            if lows[seen + r] >= highs[seen + r]:
                lse[to + r], factor[r] = LEAST, ZERO
                continue
            at, count_keys = r * stride + first, last - first
            top = find_maximum(scores, at, count_keys)
            top = top if top > LEAST else ZERO
            total = store_exponentials(scores, at, count_keys, scale, top, numbers, at)
            lse[to + r] = top * scale + np.float32(math.log(total)) if total > ZERO else (LEAST if total == ZERO else total)
            factor[r] = ONE / total if total != ZERO else ZERO


@njit_inlined()
def compute_context(place, sizes, steps, scale, q, k, v, lows, highs, out, lse):
    """Compute the context (b, q, h, e) and the log-sum-exp (b, h, q) of the key heads that this thread takes."""
    b, h, g, queries, keys, d, e = sizes
    room, shared, wide = allocate_buffers(sizes, q), h // g, round_up_to_columns(keys)
    kt = allocate_slots(q, (wide // COLUMNS, count_slots(d, q), COLUMNS))
    vd = allocate_slots(q, (round_up_to_columns(e) // COLUMNS, count_slots(wide, q), COLUMNS))
    weights, factor = allocate_row_operand(room.scores, q), np.zeros(BLOCK, np.float32)
    some = np.zeros((ROWS, COLUMNS), np.float32)
    while True:
        unit = atomic_increment(place)
        if unit >= b * g:
            return
        n = unit // g
        pack_transposed_panels(k, n * steps[3] + unit % g * steps[4], steps[5], keys, d, kt)
        pack_panels(v, n * steps[6] + unit % g * steps[7], steps[8], keys, e, vd)
        for head in range(unit % g * shared, unit % g * shared + shared):
            for i in range(0, queries, BLOCK):
                count, seen = min(BLOCK, queries - i), (n if len(lows) > queries else 0) * queries + i
                load_rows(q, n * steps[0] + head * steps[1] + i * steps[2], steps[2], count, d, room.rows)
                start, stop = find_visible_range(lows, highs, seen, count, room)
                score_block(room.rows, kt, start, stop, room.scores, room)
                to = (n * h + head) * queries + i
                exponentiate_block(lows, highs, seen, count, scale, weights, factor, lse, to, room)
                to = ((n * queries + i) * h + head) * e
                multiply_block(weights, vd, count, e, factor, out, to, h * e, some, room)


@njit_inlined()
def multiply_block(weights, panels, count, width, factor, out, to, step, some, room):
    """Multiply the rows of a block by the panels of keys, scale each row by its factor, and store the result."""
    stride, deep = weights.shape[1], panels.shape[1]
    for r in range(0, count, ROWS):
        low, high = room.low[r // ROWS], room.high[r // ROWS]
        first, depth = low // numbers_per_slot(weights), count_slots(high - low, weights)
        for c in range(len(panels)):
            multiply_tile(weights, r * stride + first, stride, 1, panels, (c * deep + first) * COLUMNS, depth, some, 0, COLUMNS)
            for one in range(min(ROWS, count - r)):
                at = to + (r + one) * step + c * COLUMNS
                store_scaled_row(some, one * COLUMNS, factor[r + one], out, at, min(COLUMNS, width - c * COLUMNS))


@njit_inlined()
def backpropagate_softmax(lows, highs, seen, count, logs, deltas, scale, grads, room):
    """Replace a block's scores by its weights, and the gradients of the weights by those of the scores."""
    for r in range(BLOCK):
        first, last = room.low[r // ROWS], round_up_to_columns(room.high[r // ROWS])
        s, x = room.scores[r, first:last], grads[r, first:last]
        if r < count and lows[seen + r] < highs[seen + r]:
            scale_and_mask_row(s, lows[seen + r] - first, highs[seen + r] - first, scale)
            compute_score_gradients(s, x, logs[r], deltas[r], scale)
        else:
            s[:] = ZERO
            x[:] = ZERO


@njit_inlined()
def pack_block_pairs(scores, start, stop, rows, couples, room):
    """Copy a block's scores to the arrays that are summed over rows and along them; 0 where no row of a group sees a key."""
    for r in range(0, BLOCK, 2):
        first, last = room.low[r // ROWS], round_up_to_columns(room.high[r // ROWS])
        copy_score_pairs(scores, rows, r, first, last, couples)
        for one in range(r // numbers_per_slot(couples), (r + 2) // numbers_per_slot(couples)):
            couples[one, start:first] = 0
            couples[one, last : round_up_to_columns(stop)] = 0


@njit_inlined()
def compute_gradients(place, sizes, steps, scale, q, k, v, lows, highs, out, lse, grad, dq, dk, dv):
    """Compute the gradients (b, q, h, d), (b, k, g, d) and (b, k, g, e) of the key heads that this thread takes."""
    b, h, g, queries, keys, d, e = sizes
    room, shared, wide = allocate_buffers(sizes, q), h // g, round_up_to_columns(keys)
    kt, vt = (
        allocate_slots(q, (wide // COLUMNS, count_slots(d, q), COLUMNS)),
        allocate_slots(q, (wide // COLUMNS, count_slots(e, q), COLUMNS)),
    )
    kd = allocate_slots(q, (round_up_to_columns(d) // COLUMNS, count_slots(wide, q), COLUMNS))
    qd = allocate_slots(q, (round_up_to_columns(d) // COLUMNS, count_slots(BLOCK, q), COLUMNS))
    gd = allocate_slots(q, (round_up_to_columns(e) // COLUMNS, count_slots(BLOCK, q), COLUMNS))
    grown, grads = allocate_slots(q, (BLOCK, count_slots(e, q))), np.zeros_like(room.scores)
    weights, slopes, rows = (
        allocate_column_operand(room.scores, q),
        allocate_column_operand(grads, q),
        allocate_row_operand(grads, q),
    )
    logs, deltas, ones = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32), np.ones(BLOCK, np.float32)
    sum_k, sum_v = np.zeros((wide, round_up_to_columns(d)), np.float32), np.zeros((wide, round_up_to_columns(e)), np.float32)
    some = np.zeros((ROWS, COLUMNS), np.float32)
    while True:
        unit = atomic_increment(place)
        if unit >= b * g:
            return
        n = unit // g
        at_k = n * steps[3] + unit % g * steps[4]
        pack_transposed_panels(k, at_k, steps[5], keys, d, kt)
        pack_transposed_panels(v, n * steps[6] + unit % g * steps[7], steps[8], keys, e, vt)
        pack_panels(k, at_k, steps[5], keys, d, kd)
        sum_k[:] = ZERO
        sum_v[:] = ZERO
        for head in range(unit % g * shared, unit % g * shared + shared):
            for i in range(0, queries, BLOCK):
                count, seen = min(BLOCK, queries - i), (n if len(lows) > queries else 0) * queries + i
                at_q, at_g = n * steps[0] + head * steps[1] + i * steps[2], n * steps[9] + head * steps[10] + i * steps[11]
                load_rows(q, at_q, steps[2], count, d, room.rows)
                load_rows(grad, at_g, steps[11], count, e, grown)
                pack_panels(q, at_q, steps[2], count, d, qd)
                pack_panels(grad, at_g, steps[11], count, e, gd)
                start, stop = find_visible_range(lows, highs, seen, count, room)
                score_block(room.rows, kt, start, stop, room.scores, room)
                score_block(grown, vt, start, stop, grads, room)
                for r in range(count):
                    to, at = ((n * queries + i + r) * h + head) * e, at_g + r * steps[11]
                    logs[r] = lse[(n * h + head) * queries + i + r]
                    deltas[r] = dot_stored_rows(out[to : to + e], grad[at : at + e])
                backpropagate_softmax(lows, highs, seen, count, logs, deltas, scale, grads, room)
                pack_block_pairs(room.scores, start, stop, rows, weights, room)
                pack_block_pairs(grads, start, stop, rows, slopes, room)
                multiply_block(rows, kd, count, d, ones, dq, ((n * queries + i) * h + head) * d, h * d, some, room)
                for j in range(start, stop, ROWS):
                    first, last = find_visible_rows(j, room)
                    accumulate_key_gradients(slopes, j, first, last, qd, sum_k)
                    accumulate_key_gradients(weights, j, first, last, gd, sum_v)
        store_sums(sum_k, dk, (n * keys * g + unit % g) * d, g * d, keys, d)
        store_sums(sum_v, dv, (n * keys * g + unit % g) * e, g * e, keys, e)


@njit_inlined()
def accumulate_key_gradients(x, j, first, last, panels, sums):
    """Add xᵀ times panels of rows, from the first to the last row of a block, to the sums of ROWS keys."""
    stride, deep, row, depth = x.shape[1], panels.shape[1], first // numbers_per_slot(x), (last - first) // numbers_per_slot(x)
    for c in range(len(panels)):
        at, to = (c * deep + row) * COLUMNS, j * sums.shape[1] + c * COLUMNS
        accumulate_tile(x, row * stride + j, 1, stride, panels, at, depth, sums, to, sums.shape[1])


@njit_inlined()
def find_visible_rows(j, room):
    """Return the first row of a block whose group sees one of the ROWS keys from j on, and the one after the last."""
    first, last = BLOCK, 0
    for group in range(len(room.low)):
        if room.low[group] < j + ROWS and j < room.high[group]:
            first, last = min(first, group * ROWS), group * ROWS + ROWS
    return (first, last) if first < last else (0, 0)


@njit_inlined()
def store_sums(sums, out, place, step, count, width):
    """Store rows of sums."""
    for j in range(count):
        store_scaled_row(sums, j * sums.shape[1], ONE, out, place + j * step, width)


@njit_inlined()
def read_arguments(arguments, dtype):
    """Return what both passes read of their arguments; the strides bound what is read of an array."""
    sizes = Sizes(arguments.b, arguments.h, arguments.g, arguments.q_tokens, arguments.k_tokens, arguments.d, arguments.e)
    count = arguments.ranges * sizes.q
    lows, highs = view_array(arguments.first_keys, count, np.int32), view_array(arguments.stop_keys, count, np.int32)
    q, k = view_array(arguments.q, FAR, dtype), view_array(arguments.k, FAR, dtype)
    v, out = view_array(arguments.v, FAR, dtype), view_array(arguments.out, FAR, dtype)
    return sizes, arguments.strides, arguments.scale, q, k, v, lows, highs, out, view_array(arguments.lse, FAR, np.float32)


@cache
def make_forward_callback(kind):
    """Build the callback that computes the context of numbers of a kind."""
    dtype = np.dtype(kind).type

    @callback_with_cache(AttentionArguments)
    def run_forward(place):
        sizes, steps, scale, q, k, v, lows, highs, out, lse = read_arguments(view_array(place, 1, FIELDS)[0], dtype)
        compute_context(place, sizes, steps, scale, q, k, v, lows, highs, out, lse)

    return run_forward


@cache
def make_backward_callback(kind):
    """Build the callback that computes the gradients of numbers of a kind."""
    dtype = np.dtype(kind).type

    @callback_with_cache(AttentionArguments)
    def run_backward(place):
        arguments = view_array(place, 1, FIELDS)[0]
        sizes, steps, scale, q, k, v, lows, highs, out, lse = read_arguments(arguments, dtype)
        grad, dq = view_array(arguments.grad, FAR, dtype), view_array(arguments.dq, FAR, dtype)
        dk, dv = view_array(arguments.dk, FAR, dtype), view_array(arguments.dv, FAR, dtype)
        compute_gradients(place, sizes, steps, scale, q, k, v, lows, highs, out, lse, grad, dq, dk, dv)

    return run_backward
