# mypy: ignore-errors
"""softmax(q kᵀ / √d) v and its gradient, compiled by numba, for one contiguous key range per query.

A thread takes one key head after another, with the queries that share it: a block of queries is scored, put through the
softmax and multiplied by the values while it is in the cache. The backward pass computes the scores again, and the weights
from the saved log-sum-exp. Sums are float32 for every dtype; in bfloat16, weights and the gradients of scores are rounded to
bfloat16 before they are summed over. `cpu.py` lists the arguments of these functions.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types
from numpy.typing import NDArray

from regard.compiled.halves import put_row
from regard.compiled.kept import callback
from regard.compiled.pointers import at, take
from regard.compiled.registers import COLUMNS, ROWS, highest, tile, tile_onto
from regard.compiled.vectors import LEAST, ONE, ZERO
from regard.mechanism.compiled.panels import (
    across,
    along,
    below,
    beside,
    bring,
    coupled,
    dot,
    each,
    exponentiate,
    kept,
    made,
    numbers,
    scaled,
    slope,
)

BLOCK = 64  # queries of a block, a multiple of ROWS
SAID = 33  # numbers in the arguments of a thread
FAR = 2**40  # beyond the end of any array
Floats = NDArray[np.float32]


class Sizes(NamedTuple):
    """The number of batch rows, heads, key heads, queries, keys, and numbers of a key and of a value."""

    b: int
    h: int
    g: int
    q: int
    k: int
    d: int
    e: int


class Room(NamedTuple):
    """The buffers for one block of queries."""

    rows: Any  # (BLOCK, slots of d), the queries
    scores: Floats  # (BLOCK, stride)
    low: NDArray[np.int64]  # (BLOCK / ROWS,), the first key that any query of each group of ROWS sees
    high: NDArray[np.int64]  # (BLOCK / ROWS,), the key after the last one


@njit(nogil=True)
def padded(n):
    """Round n up to a multiple of COLUMNS."""
    return -(-n // COLUMNS) * COLUMNS


@njit(nogil=True)
def places(n, x):
    """Return the number of slots that n numbers of the dtype of x take."""
    return -(-n // each(x))


@njit(nogil=True)
def room_for(sizes, x):
    """Allocate the buffers for a block; rows of scores are not a power of two apart, which would share one cache set."""
    groups = BLOCK // ROWS
    rows, scores = made(x, (BLOCK, places(sizes.d, x))), np.zeros((BLOCK, padded(sizes.k) + COLUMNS), np.float32)
    return Room(rows, scores, np.zeros(groups, np.int64), np.zeros(groups, np.int64))


@njit(nogil=True)
def bound(lows, highs, first, count, room):
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


@njit(nogil=True)
def score(rows, panels, start, stop, out, room):
    """Multiply the rows of each group by the panels of keys that the group sees."""
    depth, stride = rows.shape[1], out.shape[1]
    for j in range(start, stop, COLUMNS):
        for group in range(len(room.low)):
            if room.low[group] <= j < room.high[group]:
                r = group * ROWS
                tile(rows, r * depth, depth, 1, panels, j * depth, depth, out, r * stride + j, stride)


@njit(nogil=True)
def look(s, low, high, scale):
    """Scale the scores from low to high, and set those outside to -inf."""
    s[:low] = LEAST
    scaled(s[low:high], scale)
    s[high:] = LEAST


@njit(nogil=True)
def softmax(low, high, group, r, scale, weights, room):
    """Replace a row's scores by exponentials; return their sum, and its log plus the shift, 0 and -inf for a row without keys.

    low and high bound the keys that this row of the group sees.
    """
    first, last = room.low[group], padded(room.high[group])
    s = room.scores[r, first:last]
    if low >= high:
        numbers(weights)[r, first:last] = 0
        return ZERO, LEAST
    look(s, low - first, high - first, scale)
    top = highest(room.scores, r * room.scores.shape[1] + first, last - first)
    shift = top if top > LEAST else ZERO
    total = exponentiate(s, shift)
    kept(room.scores, r, first, last, weights)
    return total, shift + np.float32(math.log(total)) if total > ZERO else (LEAST if total == ZERO else total)


@njit(nogil=True)
def forward(place, sizes, steps, scale, q, k, v, lows, highs, out, lse):
    """Compute the context (b, q, h, e) and the log-sum-exp (b, h, q) of the key heads that this thread takes."""
    b, h, g, queries, keys, d, e = sizes
    room, shared, wide = room_for(sizes, q), h // g, padded(keys)
    kt = made(q, (wide // COLUMNS, places(d, q), COLUMNS))
    vd = made(q, (padded(e) // COLUMNS, places(wide, q), COLUMNS))
    weights, factor = beside(room.scores, q), np.zeros(BLOCK, np.float32)
    some = np.zeros((ROWS, COLUMNS), np.float32)
    while True:
        unit = take(place)
        if unit >= b * g:
            return
        n = unit // g
        across(k, n * steps[3] + unit % g * steps[4], steps[5], keys, d, kt)
        along(v, n * steps[6] + unit % g * steps[7], steps[8], keys, e, vd)
        for head in range(unit % g * shared, unit % g * shared + shared):
            for i in range(0, queries, BLOCK):
                count, seen = min(BLOCK, queries - i), (n if len(lows) > queries else 0) * queries + i
                bring(q, n * steps[0] + head * steps[1] + i * steps[2], steps[2], count, d, room.rows)
                start, stop = bound(lows, highs, seen, count, room)
                score(room.rows, kt, start, stop, room.scores, room)
                for r in range(count):
                    total, log = softmax(lows[seen + r], highs[seen + r], r // ROWS, r, scale, weights, room)
                    lse[(n * h + head) * queries + i + r] = log
                    factor[r] = ONE / total if total != ZERO else ZERO
                to = ((n * queries + i) * h + head) * e
                spread(weights, vd, count, e, factor, out, to, h * e, some, room)


@njit(nogil=True)
def spread(weights, panels, count, width, factor, out, to, step, some, room):
    """Multiply the rows of a block by the panels of keys, scale each row by its factor, and store the result."""
    stride, deep = weights.shape[1], panels.shape[1]
    for r in range(0, count, ROWS):
        low, high = room.low[r // ROWS], room.high[r // ROWS]
        first, depth = low // each(weights), places(high - low, weights)
        for c in range(len(panels)):
            tile(weights, r * stride + first, stride, 1, panels, (c * deep + first) * COLUMNS, depth, some, 0, COLUMNS)
            for one in range(min(ROWS, count - r)):
                at = to + (r + one) * step + c * COLUMNS
                put_row(some, one * COLUMNS, factor[r + one], out, at, min(COLUMNS, width - c * COLUMNS))


@njit(nogil=True)
def weigh(lows, highs, seen, count, logs, deltas, scale, grads, room):
    """Replace a block's scores by its weights, and the gradients of the weights by those of the scores."""
    for r in range(BLOCK):
        first, last = room.low[r // ROWS], padded(room.high[r // ROWS])
        s, x = room.scores[r, first:last], grads[r, first:last]
        if r < count and lows[seen + r] < highs[seen + r]:
            look(s, lows[seen + r] - first, highs[seen + r] - first, scale)
            slope(s, x, logs[r], deltas[r], scale)
        else:
            s[:] = ZERO
            x[:] = ZERO


@njit(nogil=True)
def couple(scores, start, stop, rows, couples, room):
    """Copy a block's scores to the arrays that are summed over rows and along them; 0 where no row of a group sees a key."""
    for r in range(0, BLOCK, 2):
        first, last = room.low[r // ROWS], padded(room.high[r // ROWS])
        coupled(scores, rows, r, first, last, couples)
        for one in range(r // each(couples), (r + 2) // each(couples)):
            couples[one, start:first] = 0
            couples[one, last : padded(stop)] = 0


@njit(nogil=True)
def backward(place, sizes, steps, scale, q, k, v, lows, highs, out, lse, grad, dq, dk, dv):
    """Compute the gradients (b, q, h, d), (b, k, g, d) and (b, k, g, e) of the key heads that this thread takes."""
    b, h, g, queries, keys, d, e = sizes
    room, shared, wide = room_for(sizes, q), h // g, padded(keys)
    kt, vt = made(q, (wide // COLUMNS, places(d, q), COLUMNS)), made(q, (wide // COLUMNS, places(e, q), COLUMNS))
    kd = made(q, (padded(d) // COLUMNS, places(wide, q), COLUMNS))
    qd = made(q, (padded(d) // COLUMNS, places(BLOCK, q), COLUMNS))
    gd = made(q, (padded(e) // COLUMNS, places(BLOCK, q), COLUMNS))
    grown, grads = made(q, (BLOCK, places(e, q))), np.zeros_like(room.scores)
    weights, slopes, rows = below(room.scores, q), below(grads, q), beside(grads, q)
    logs, deltas, ones = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32), np.ones(BLOCK, np.float32)
    sum_k, sum_v = np.zeros((wide, padded(d)), np.float32), np.zeros((wide, padded(e)), np.float32)
    some = np.zeros((ROWS, COLUMNS), np.float32)
    while True:
        unit = take(place)
        if unit >= b * g:
            return
        n = unit // g
        at_k = n * steps[3] + unit % g * steps[4]
        across(k, at_k, steps[5], keys, d, kt)
        across(v, n * steps[6] + unit % g * steps[7], steps[8], keys, e, vt)
        along(k, at_k, steps[5], keys, d, kd)
        sum_k[:] = ZERO
        sum_v[:] = ZERO
        for head in range(unit % g * shared, unit % g * shared + shared):
            for i in range(0, queries, BLOCK):
                count, seen = min(BLOCK, queries - i), (n if len(lows) > queries else 0) * queries + i
                at_q, at_g = n * steps[0] + head * steps[1] + i * steps[2], n * steps[9] + head * steps[10] + i * steps[11]
                bring(q, at_q, steps[2], count, d, room.rows)
                bring(grad, at_g, steps[11], count, e, grown)
                along(q, at_q, steps[2], count, d, qd)
                along(grad, at_g, steps[11], count, e, gd)
                start, stop = bound(lows, highs, seen, count, room)
                score(room.rows, kt, start, stop, room.scores, room)
                score(grown, vt, start, stop, grads, room)
                for r in range(count):
                    to, at = ((n * queries + i + r) * h + head) * e, at_g + r * steps[11]
                    logs[r] = lse[(n * h + head) * queries + i + r]
                    deltas[r] = dot(out[to : to + e], grad[at : at + e])
                weigh(lows, highs, seen, count, logs, deltas, scale, grads, room)
                couple(room.scores, start, stop, rows, weights, room)
                couple(grads, start, stop, rows, slopes, room)
                spread(rows, kd, count, d, ones, dq, ((n * queries + i) * h + head) * d, h * d, some, room)
                for j in range(start, stop, ROWS):
                    first, last = seen_by(j, room)
                    gather(slopes, j, first, last, qd, sum_k)
                    gather(weights, j, first, last, gd, sum_v)
        hand(sum_k, dk, (n * keys * g + unit % g) * d, g * d, keys, d)
        hand(sum_v, dv, (n * keys * g + unit % g) * e, g * e, keys, e)


@njit(nogil=True)
def gather(x, j, first, last, panels, sums):
    """Add xᵀ times panels of rows, from the first to the last row of a block, to the sums of ROWS keys."""
    stride, deep, row, depth = x.shape[1], panels.shape[1], first // each(x), (last - first) // each(x)
    for c in range(len(panels)):
        at, to = (c * deep + row) * COLUMNS, j * sums.shape[1] + c * COLUMNS
        tile_onto(x, row * stride + j, 1, stride, panels, at, depth, sums, to, sums.shape[1])


@njit(nogil=True)
def seen_by(j, room):
    """Return the first row of a block whose group sees one of the ROWS keys from j on, and the one after the last."""
    first, last = BLOCK, 0
    for group in range(len(room.low)):
        if room.low[group] < j + ROWS and j < room.high[group]:
            first, last = min(first, group * ROWS), group * ROWS + ROWS
    return (first, last) if first < last else (0, 0)


@njit(nogil=True)
def hand(sums, out, place, step, count, width):
    """Store rows of sums."""
    for j in range(count):
        put_row(sums, j * sums.shape[1], ONE, out, place + j * step, width)


@njit(nogil=True)
def met(said, dtype):
    """Read the arguments of both passes from the numbers that `cpu.py` lists; the strides bound what is read of an array."""
    sizes = Sizes(said[1], said[2], said[3], said[4], said[5], said[6], said[7])
    scale, count = carray(at(said[21]), (1,), np.float32)[0], said[8] * sizes.q
    lows, highs = carray(at(said[22]), (count,), np.int32), carray(at(said[23]), (count,), np.int32)
    q, k, v = carray(at(said[24]), (FAR,), dtype), carray(at(said[25]), (FAR,), dtype), carray(at(said[26]), (FAR,), dtype)
    out, lse = carray(at(said[27]), (FAR,), dtype), carray(at(said[28]), (FAR,), np.float32)
    return sizes, said[9:21], scale, q, k, v, lows, highs, out, lse


@cache
def ahead(kind):
    """Build the callback that computes the context of numbers of a kind; it takes the address of what `cpu.py` lists."""
    dtype = np.dtype(kind).type

    @callback(types.void(types.voidptr))
    def work(place):
        sizes, steps, scale, q, k, v, lows, highs, out, lse = met(carray(place, SAID, np.int64), dtype)
        forward(place, sizes, steps, scale, q, k, v, lows, highs, out, lse)

    return work


@cache
def back(kind):
    """Build the callback that computes the gradients of numbers of a kind; it takes the address of what `cpu.py` lists."""
    dtype = np.dtype(kind).type

    @callback(types.void(types.voidptr))
    def work(place):
        said = carray(place, SAID, np.int64)
        sizes, steps, scale, q, k, v, lows, highs, out, lse = met(said, dtype)
        grad, dq = carray(at(said[29]), (FAR,), dtype), carray(at(said[30]), (FAR,), dtype)
        dk, dv = carray(at(said[31]), (FAR,), dtype), carray(at(said[32]), (FAR,), dtype)
        backward(place, sizes, steps, scale, q, k, v, lows, highs, out, lse, grad, dq, dk, dv)

    return work
