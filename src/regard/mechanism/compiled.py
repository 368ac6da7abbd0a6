# mypy: ignore-errors
"""softmax(q kᵀ / √d) v and its gradient, compiled by numba, for queries that each see one stretch of keys.

A thread takes one head of keys after another, with the queries that share it: a block of queries is scored, put through the
softmax and multiplied by the values while it lies in the cache. The gradient scores the block again, by the log-sum-exp that
was kept. Sums are float32, whatever the numbers in memory are. `cpu.py` says what these functions are handed.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import carray, njit, types
from numpy.typing import NDArray

from regard.compiled.halves import put, read
from regard.compiled.kept import callback
from regard.compiled.pointers import at, take
from regard.compiled.registers import COLUMNS, ROWS, highest, tile, tile_onto
from regard.compiled.vectors import LEAST, LOWEST, ONE, REASSOCIATED, ZERO, exponential

BLOCK = 64  # queries at a time, a multiple of ROWS
SAID = 33  # numbers that a thread is handed
FAR = 2**40  # beyond the end of any array
Floats = NDArray[np.float32]


class Sizes(NamedTuple):
    """How many there are of each: batch rows, heads, heads of keys, queries, keys, numbers of a key and of a value."""

    b: int
    h: int
    g: int
    q: int
    k: int
    d: int
    e: int


class Room(NamedTuple):
    """What a block of queries is worked on in."""

    rows: Floats  # (BLOCK, d), the queries
    scores: Floats  # (BLOCK, stride), then weights or their exponentials
    low: NDArray[np.int64]  # (BLOCK / ROWS,), of each ROWS queries the first key that one of them sees
    high: NDArray[np.int64]  # the one after the last


@njit(nogil=True)
def padded(n):
    """n, up to a multiple of COLUMNS."""
    return -(-n // COLUMNS) * COLUMNS


@njit(nogil=True)
def room_for(sizes):
    """Room for a block; rows of scores do not lie a power of two apart, where they would share a place in the cache."""
    groups = BLOCK // ROWS
    stride = padded(sizes.k) + COLUMNS
    rows, scores = np.zeros((BLOCK, sizes.d), np.float32), np.zeros((BLOCK, stride), np.float32)
    return Room(rows, scores, np.zeros(groups, np.int64), np.zeros(groups, np.int64))


@njit(nogil=True)
def across(x, place, step, count, scale, panels):
    """Rows of x, scaled, as panels (rows / COLUMNS, numbers of a row, COLUMNS)."""
    for j in range(count):
        for p in range(panels.shape[1]):
            panels[j // COLUMNS, p, j % COLUMNS] = read(x[place + j * step + p]) * scale


@njit(nogil=True)
def along(x, place, step, count, width, panels):
    """Rows of x as panels (numbers of a row / COLUMNS, rows, COLUMNS)."""
    for c in range(len(panels)):
        for j in range(count):
            for p in range(min(COLUMNS, width - c * COLUMNS)):
                panels[c, j, p] = read(x[place + j * step + c * COLUMNS + p])


@njit(nogil=True)
def bring(x, place, step, count, rows):
    """Rows of x, the others 0."""
    for r in range(count):
        for p in range(rows.shape[1]):
            rows[r, p] = read(x[place + r * step + p])
    rows[count:] = ZERO


@njit(nogil=True)
def bound(lows, highs, first, count, room):
    """The keys that each group of queries sees, and the whole block; the first a multiple of COLUMNS."""
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
    """Each group's rows times the panels of keys that it sees."""
    depth, stride = rows.shape[1], out.shape[1]
    for j in range(start, stop, COLUMNS):
        for group in range(len(room.low)):
            if room.low[group] <= j < room.high[group]:
                r = group * ROWS
                tile(rows, r * depth, depth, 1, panels, j * depth, depth, out, r * stride + j, stride)


@njit(fastmath=REASSOCIATED, nogil=True)
def exponentiate(s, shift):
    """exp(s - shift) in the place of s; their sum."""
    total = ZERO
    for j in range(len(s)):
        z = s[j] - shift
        e = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)
        s[j] = e
        total += e
    return total


@njit(fastmath=REASSOCIATED, nogil=True)
def returned(s, x, lse, delta, scale):
    """Weights in the place of scores s, and w (x - delta) scale, the gradient of the scores, in that of x, the weights'."""
    for j in range(len(s)):
        z = min(s[j] - lse, ZERO)
        w = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)
        s[j] = w
        x[j] = w * (x[j] - delta) * scale


@njit(nogil=True)
def hide(s, low, high):
    """-inf in the place of scores outside a stretch."""
    s[:low] = LEAST
    s[high:] = LEAST


@njit(nogil=True)
def softmax(low, high, group, r, room):
    """Exponentials of a row in the place of its scores; their sum and the log of it with the shift, 0 and -inf for a blind row.

    low and high are the stretch of keys that this row of the group sees.
    """
    first, last = room.low[group], padded(room.high[group])
    s = room.scores[r, first:last]
    if low >= high:
        s[:] = ZERO
        return ZERO, LEAST
    hide(s, low - first, high - first)
    shift = highest(room.scores, r * room.scores.shape[1] + first, last - first)
    total = exponentiate(s, shift if shift > LEAST else ZERO)
    return total, shift + np.float32(math.log(total)) if total > ZERO else (LEAST if total == ZERO else total)


@njit(nogil=True)
def forward(place, sizes, steps, scale, q, k, v, lows, highs, out, lse):
    """The context (b, q, h, e) and the log-sum-exp (b, h, q), of the heads of keys that no other thread takes."""
    b, h, g, queries, keys, d, e = sizes
    room, shared = room_for(sizes), h // g
    kt = np.zeros((padded(keys) // COLUMNS, d, COLUMNS), np.float32)
    vd = np.zeros((padded(e) // COLUMNS, padded(keys), COLUMNS), np.float32)
    some, factor = np.zeros((ROWS, COLUMNS), np.float32), np.zeros(BLOCK, np.float32)
    stride = room.scores.shape[1]
    while True:
        unit = take(place)
        if unit >= b * g:
            return
        n = unit // g
        across(k, n * steps[3] + unit % g * steps[4], steps[5], keys, scale, kt)
        along(v, n * steps[6] + unit % g * steps[7], steps[8], keys, e, vd)
        for head in range(unit % g * shared, unit % g * shared + shared):
            for i in range(0, queries, BLOCK):
                count, seen = min(BLOCK, queries - i), (n if len(lows) > queries else 0) * queries + i
                bring(q, n * steps[0] + head * steps[1] + i * steps[2], steps[2], count, room.rows)
                start, stop = bound(lows, highs, seen, count, room)
                score(room.rows, kt, start, stop, room.scores, room)
                for r in range(count):
                    total, log = softmax(lows[seen + r], highs[seen + r], r // ROWS, r, room)
                    lse[(n * h + head) * queries + i + r] = log
                    factor[r] = ONE / total if total != ZERO else ZERO
                for r in range(0, count, ROWS):
                    low, high = room.low[r // ROWS], room.high[r // ROWS]
                    for c in range(len(vd)):
                        at_v = (c * padded(keys) + low) * COLUMNS
                        tile(room.scores, r * stride + low, stride, 1, vd, at_v, high - low, some, 0, COLUMNS)
                        for one in range(min(ROWS, count - r)):
                            to = ((n * queries + i + r + one) * h + head) * e + c * COLUMNS
                            for p in range(min(COLUMNS, e - c * COLUMNS)):
                                put(out, to + p, some[one, p] * factor[r + one])


@njit(fastmath=REASSOCIATED, nogil=True)
def dot(a, place, rows, r):
    """The sum of the products of a row in memory with one that has been brought."""
    total = ZERO
    for p in range(rows.shape[1]):
        total += read(a[place + p]) * rows[r, p]
    return total


@njit(nogil=True)
def weigh(lows, highs, seen, count, start, stop, lse, out, to, step, scale, grown, ds, room):
    """Weights of a block in the place of its scores, the scores' gradients in that of the weights'; 0 where none is seen."""
    end = padded(stop)
    for r in range(BLOCK):
        first, last = room.low[r // ROWS], padded(room.high[r // ROWS])
        s, x = room.scores[r], ds[r]
        if r >= count or lows[seen + r] >= highs[seen + r] or first == last:
            s[start:end] = ZERO
            x[start:end] = ZERO
            continue
        hide(s[first:last], lows[seen + r] - first, highs[seen + r] - first)
        returned(s[first:last], x[first:last], lse[r], dot(out, to + r * step, grown, r), scale)
        s[start:first] = ZERO
        x[start:first] = ZERO
        s[last:end] = ZERO
        x[last:end] = ZERO


@njit(nogil=True)
def backward(place, sizes, steps, scale, q, k, v, lows, highs, out, lse, grad, dq, dk, dv):
    """The gradients (b, q, h, d), (b, k, g, d) and (b, k, g, e), of the heads of keys that no other thread takes."""
    b, h, g, queries, keys, d, e = sizes
    room, shared = room_for(sizes), h // g
    wide = padded(keys)
    kt, vt = np.zeros((wide // COLUMNS, d, COLUMNS), np.float32), np.zeros((wide // COLUMNS, e, COLUMNS), np.float32)
    kd = np.zeros((padded(d) // COLUMNS, wide, COLUMNS), np.float32)
    qd = np.zeros((padded(d) // COLUMNS, BLOCK, COLUMNS), np.float32)
    gd = np.zeros((padded(e) // COLUMNS, BLOCK, COLUMNS), np.float32)
    grown, ds = np.zeros((BLOCK, e), np.float32), np.zeros_like(room.scores)
    sum_k, sum_v = np.zeros((wide, padded(d)), np.float32), np.zeros((wide, padded(e)), np.float32)
    some, stride = np.zeros((ROWS, COLUMNS), np.float32), ds.shape[1]
    while True:
        unit = take(place)
        if unit >= b * g:
            return
        n = unit // g
        at_k = n * steps[3] + unit % g * steps[4]
        across(k, at_k, steps[5], keys, scale, kt)
        across(v, n * steps[6] + unit % g * steps[7], steps[8], keys, ONE, vt)
        along(k, at_k, steps[5], keys, d, kd)
        sum_k[:] = ZERO
        sum_v[:] = ZERO
        for head in range(unit % g * shared, unit % g * shared + shared):
            for i in range(0, queries, BLOCK):
                count, seen = min(BLOCK, queries - i), (n if len(lows) > queries else 0) * queries + i
                at_q, at_g = n * steps[0] + head * steps[1] + i * steps[2], n * steps[9] + head * steps[10] + i * steps[11]
                bring(q, at_q, steps[2], count, room.rows)
                bring(grad, at_g, steps[11], count, grown)
                along(q, at_q, steps[2], count, d, qd)
                along(grad, at_g, steps[11], count, e, gd)
                start, stop = bound(lows, highs, seen, count, room)
                score(room.rows, kt, start, stop, room.scores, room)
                score(grown, vt, start, stop, ds, room)
                own = lse[(n * h + head) * queries + i : (n * h + head) * queries + i + count]
                to = ((n * queries + i) * h + head) * e
                weigh(lows, highs, seen, count, start, stop, own, out, to, h * e, scale, grown, ds, room)
                for r in range(0, count, ROWS):
                    low, high = room.low[r // ROWS], room.high[r // ROWS]
                    for c in range(len(kd)):
                        tile(ds, r * stride + low, stride, 1, kd, (c * wide + low) * COLUMNS, high - low, some, 0, COLUMNS)
                        for one in range(min(ROWS, count - r)):
                            to = ((n * queries + i + r + one) * h + head) * d + c * COLUMNS
                            for p in range(min(COLUMNS, d - c * COLUMNS)):
                                put(dq, to + p, some[one, p])
                for j in range(start, stop, ROWS):
                    first, last = seen_by(j, room)
                    gather(ds, j, first, last, qd, sum_k)
                    gather(room.scores, j, first, last, gd, sum_v)
        hand(sum_k, dk, (n * keys * g + unit % g) * d, g * d, keys, d)
        hand(sum_v, dv, (n * keys * g + unit % g) * e, g * e, keys, e)


@njit(nogil=True)
def gather(x, j, first, last, panels, sums):
    """xᵀ times panels of rows, from the first to the last of a block, added to the sums of ROWS keys."""
    stride = x.shape[1]
    for c in range(len(panels)):
        at, to = (c * BLOCK + first) * COLUMNS, j * sums.shape[1] + c * COLUMNS
        tile_onto(x, first * stride + j, 1, stride, panels, at, last - first, sums, to, sums.shape[1])


@njit(nogil=True)
def seen_by(j, room):
    """The first row of a block whose group sees one of ROWS keys, and the one after the last."""
    first, last = BLOCK, 0
    for group in range(len(room.low)):
        if room.low[group] < j + ROWS and j < room.high[group]:
            first, last = min(first, group * ROWS), group * ROWS + ROWS
    return (first, last) if first < last else (0, 0)


@njit(nogil=True)
def hand(sums, out, place, step, count, width):
    """Rows of sums, to memory."""
    for j in range(count):
        for p in range(width):
            put(out, place + j * step + p, sums[j, p])


@njit(nogil=True)
def met(said, dtype):
    """What both take of the numbers that `cpu.py` lists; strides say how much of an array is read."""
    sizes = Sizes(said[1], said[2], said[3], said[4], said[5], said[6], said[7])
    scale, count = carray(at(said[21]), (1,), np.float32)[0], said[8] * sizes.q
    lows, highs = carray(at(said[22]), (count,), np.int32), carray(at(said[23]), (count,), np.int32)
    q, k, v = carray(at(said[24]), (FAR,), dtype), carray(at(said[25]), (FAR,), dtype), carray(at(said[26]), (FAR,), dtype)
    out, lse = carray(at(said[27]), (FAR,), dtype), carray(at(said[28]), (FAR,), np.float32)
    return sizes, said[9:21], scale, q, k, v, lows, highs, out, lse


@cache
def ahead(kind):
    """What a thread does to find the context of numbers of a kind, given the address of what `cpu.py` lists."""
    dtype = np.dtype(kind).type

    @callback(types.void(types.voidptr))
    def work(place):
        sizes, steps, scale, q, k, v, lows, highs, out, lse = met(carray(place, SAID, np.int64), dtype)
        forward(place, sizes, steps, scale, q, k, v, lows, highs, out, lse)

    return work


@cache
def back(kind):
    """What it does to find the gradients."""
    dtype = np.dtype(kind).type

    @callback(types.void(types.voidptr))
    def work(place):
        said = carray(place, SAID, np.int64)
        sizes, steps, scale, q, k, v, lows, highs, out, lse = met(said, dtype)
        grad, dq = carray(at(said[29]), (FAR,), dtype), carray(at(said[30]), (FAR,), dtype)
        dk, dv = carray(at(said[31]), (FAR,), dtype), carray(at(said[32]), (FAR,), dtype)
        backward(place, sizes, steps, scale, q, k, v, lows, highs, out, lse, grad, dq, dk, dv)

    return work
