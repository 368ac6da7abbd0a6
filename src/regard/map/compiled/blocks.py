# mypy: ignore-errors
"""Blocks of a few rows, scored and put through the softmax while they are in the cache, compiled by numba.

A block's scores are stretches of CHUNK keys, each of which leaves the registers once, is exponentiated while it is in the
cache, with the largest score so far for a shift, and is brought to the common shift when the whole row is known.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from regard.compiled.kept import kept
from regard.compiled.registers import COLUMNS, ROWS, highest, tile
from regard.compiled.vectors import LEAST, ZERO, add, cap, exponentiate, hide, merge

CHUNK = 1024  # keys of a stretch, a multiple of COLUMNS
STRIDE = CHUNK + COLUMNS  # numbers between its rows: those of a power of two would share a place in the cache
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Plan(NamedTuple):
    """Which keys some runs of rows meet."""

    runs: Integers  # a line for each: start, stop; first and last line of its ranges, first and last of its partial ones
    ranges: Integers  # a line for each: start, stop; every start a multiple of COLUMNS
    partial: Integers  # a line for each part of a range that is not seen by all: start, stop, where in the table it begins
    table: NDArray[np.bool_]  # which keys are seen, row after row
    chunks: int  # stretches of keys that a row has at most
    rows: int  # of a block at most, a multiple of ROWS


class Scores(NamedTuple):
    """What scores are made of."""

    q: Floats  # the queries in memory; rows up to a multiple of ROWS may be read
    stride: int  # from one of them to the next
    panels: Floats  # the keys, scaled, (panels, d, COLUMNS)
    softcap: np.float32  # 0 for none
    bias: Floats  # (rows or 1, k or 1), of the rows of the plan; (0, 0) for none
    sink: np.float32  # -inf for none
    position: int  # of the first row among the keys


class Room(NamedTuple):
    """What one thread works in."""

    e: Floats  # (chunks, rows, STRIDE): scores, then their exponentials
    factors: Floats  # (chunks, rows): what makes weights of them
    sums: NDArray[np.float64]  # (chunks, rows, 4): the shift of each, and what exponentiate says
    keys: Integers  # (chunks, 3): the first key, the number of keys, and the same with what fills the last vectors up


@kept("void(float32[:,:], float32, float32[:,:,::1])")
def pack(x, scale, panels):
    """Columns (d, n), scaled, as panels (n / COLUMNS, d, COLUMNS)."""
    for j in range(x.shape[1]):
        panel, place = panels[j // COLUMNS], j % COLUMNS
        for p in range(len(x)):
            panel[p, place] = x[p, j] * scale


@njit(nogil=True)
def room_for(plan):
    """Room for a block of a plan."""
    chunks, rows = plan.chunks, plan.rows
    return Room(
        np.empty((chunks, rows, STRIDE), np.float32),
        np.empty((chunks, rows), np.float32),
        np.empty((chunks, rows, 4)),
        np.empty((chunks, 3), np.int64),
    )


@njit(nogil=True)
def seen_by(plan, line, first, rows, width):
    """The first column of a part of the table that one of some rows sees, and the one after the last; width, 0 for none."""
    at = plan.partial[line, 2] + first * width
    seen = np.zeros(width, np.bool_)
    for r in range(rows):
        merge(seen, plan.table[at + r * width : at + (r + 1) * width])
    low, high = 0, width
    while low < width and not seen[low]:
        low += 1
    while high > low and not seen[high - 1]:
        high -= 1
    return (low, high) if low < width else (width, 0)


@njit(nogil=True)
def cut(plan, run, row, stop, keys):
    """The keys that some rows of a run meet, in stretches; how many there are."""
    count = 0
    for line in range(plan.runs[run, 2], plan.runs[run, 3]):
        first, last = plan.ranges[line]
        low, high = first, last
        for part in range(plan.runs[run, 4], plan.runs[run, 5]):
            start, end = plan.partial[part, 0], plan.partial[part, 1]
            if (start == first) or (end == last):
                a, b = seen_by(plan, part, row - plan.runs[run, 0], stop - row, end - start)
                if start == first:
                    low = (start + a) // COLUMNS * COLUMNS
                if end == last:
                    high = start + b
        while low < high:
            length = min(CHUNK, high - low)
            keys[count, 0], keys[count, 1], keys[count, 2] = low, length, -(-length // COLUMNS) * COLUMNS
            low += CHUNK
            count += 1
    return count


@njit(nogil=True)
def score(plan, scores, run, row, stop, c, room):
    """A stretch of the scores that the softmax takes."""
    first, length, full = room.keys[c]
    depth = scores.panels.shape[1]
    for j in range(0, full, COLUMNS):
        for r in range(0, stop - row, ROWS):  # while the panel is in the nearest cache
            at, out = (first + j) * depth, (c * plan.rows + r) * STRIDE + j
            tile(scores.q, (row + r) * scores.stride, scores.stride, 1, scores.panels, at, depth, room.e, out, STRIDE)
    for r in range(stop - row):
        room.e[c, r, length:full] = LEAST
        s = room.e[c, r, :length]
        if scores.softcap > 0:
            cap(s, scores.softcap)
        if len(scores.bias):
            bias = scores.bias[row + r - plan.runs[0, 0] if len(scores.bias) > 1 else 0]
            if len(bias) > 1:
                add(s, bias[first : first + length])
            else:
                s += bias[0]
        for part in range(plan.runs[run, 4], plan.runs[run, 5]):
            start, end, at = plan.partial[part]
            low, high = max(start, first), min(end, first + length)
            if low < high:
                line = at + (row + r - plan.runs[run, 0]) * (end - start) - start
                hide(s[low - first : high - first], plan.table[line + low : line + high])


@njit(nogil=True)
def softmax(plan, scores, run, row, stop, room, found):
    """Rows of exponentials in stretches, the factors that make weights of them, and what `fast.NAMES` says of each row.

    found is (NAMES, rows). The number of stretches.
    """
    count = cut(plan, run, row, stop, room.keys)
    tops = np.full(plan.rows, LEAST, np.float32)
    for c in range(count):
        score(plan, scores, run, row, stop, c, room)
        for r in range(stop - row):
            s = room.e[c, r, : room.keys[c, 2]]
            tops[r] = max(tops[r], highest(room.e, (c * plan.rows + r) * STRIDE, len(s)))
            shift = max(tops[r], scores.sink)
            shift = shift if shift > LEAST else ZERO
            a, b, place = exponentiate(s, shift)
            sums = room.sums[c, r]
            sums[0], sums[1], sums[2], sums[3] = shift, a, b, place + np.float64(a) * room.keys[c, 0]
    for r in range(stop - row):
        describe(row + r, r, count, tops[r], scores, room, found)
    return count


@njit(nogil=True)
def describe(row, r, count, top, scores, room, found):
    """Brings the stretches of a row to one shift."""
    sink = scores.sink
    shift = max(top, sink)
    shift = shift if shift > LEAST else ZERO  # of a blind row
    alone, weighted, place = 0.0, 0.0, 0.0
    for c in range(count):
        own, a, b, p = room.sums[c, r]
        factor = 1.0 if own == shift or a == 0 else math.exp(own - shift)
        room.factors[c, r] = factor
        alone += factor * a
        weighted += factor * (b + a * (own - shift))
        place += factor * p
    below = alone + math.exp(sink - shift) if sink > LEAST else alone
    inverse = 1 / below if below != 0 else 0.0
    for c in range(count):
        room.factors[c, r] *= inverse
    found[0, row], found[1, row] = shift, below
    logarithm = math.log(below) if below > 0 else 0.0
    found[2, row] = shift + logarithm if below != 0 else -np.inf
    found[3, row] = alone * inverse * logarithm - weighted * inverse
    found[4, row] = math.exp(top - shift) * inverse
    found[5, row] = ((scores.position + row) * alone - place) * inverse


@njit(nogil=True)
def weight_on(key, r, count, room):
    """The weight of a row on a key, 0 where the row has none for it."""
    for c in range(count):
        first, length, _ = room.keys[c]
        if first <= key < first + length:
            return room.e[c, r, key - first] * room.factors[c, r]
    return ZERO
