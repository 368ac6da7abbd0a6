# mypy: ignore-errors
"""Blocks of a few rows, scored and put through the softmax while they are in the cache, compiled by numba.

A block's scores are stored in chunks of CHUNK keys. Each chunk is written once, exponentiated while it is in the cache, with
the largest score so far as its shift, and rescaled to the common shift once the whole row has been seen.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import FAR, view_array
from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, find_maximum, multiply_tile
from regard.compiled.vectors import (
    LEAST,
    ONE,
    ZERO,
    add_bias,
    cap_scores,
    exponentiate_with_sums,
    hide_scores,
    merge_visible,
    scale_row,
)

CHUNK = 1024  # most keys of a chunk, a multiple of COLUMNS
STRIDE = CHUNK + COLUMNS  # numbers between rows of a chunk: rows a power of two apart would evict one another
Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class BlockPlan(NamedTuple):
    """Which keys each run of rows sees."""

    runs: Integers  # a line each: start, stop; first and last line of its ranges; first and last line of its partial ranges
    ranges: Integers  # a line each: start, stop; every start a multiple of COLUMNS
    partial: Integers  # a line for each part of a range that not all rows see: start, stop, its index in the table
    table: NDArray[np.bool_]  # which keys are visible, row after row
    chunks: int  # most chunks of keys in a row
    rows: int  # most rows of a block, a multiple of ROWS


class ScoreInputs(NamedTuple):
    """The inputs of the scores."""

    q: Floats  # the queries, flat; readable to the end of the last tile of ROWS rows
    stride: int  # from one query to the next
    panels: Floats  # the keys, scaled, (panels, d, COLUMNS)
    softcap: np.float32  # 0 for none
    bias: Floats  # (rows or 1, k or 1) for the rows of the plan; (0, 0) for none
    sink: np.float32  # -inf for none
    position: int  # of the first query among the keys


class PlaneInputs(NamedTuple):
    """The queries and keys of matrices that share a plan, as they are in memory."""

    lines: Integers  # a line each: its number; addresses of queries and keys; their strides; those of their numbers; position
    sinks: Floats  # -inf for none
    queries: int
    keys: int
    scale: np.float32


class ProductInputs(NamedTuple):
    """The inputs of the products l_i · r_j of an attribution map, and what they are multiplied by."""

    left: Floats  # the left vectors, flat; readable as the queries are
    stride: int  # from one left vector to the next
    panels: Floats  # the right vectors, (panels, e, COLUMNS)
    is_weighted: bool  # if not, hidden products are 0 and the others stay as they are
    means: Floats  # (rows,): the means of the products under the weights, for factor "cut"; (0,) otherwise


class Buffers(NamedTuple):
    """The buffers of one thread."""

    e: Floats  # (chunks, rows, STRIDE): scores, then their exponentials
    factors: Floats  # (chunks, rows): exponentials times their factor are weights
    sums: NDArray[np.float64]  # (chunks, rows, 4): the shift, and the three sums of exponentiate_with_sums
    keys: Integers  # (chunks, 3): first key, number of keys, number of keys rounded up to full vectors


@njit_with_cache("void(float32[:,:], float32, float32[:,:,::1])")
def fill_panels(x, scale, panels):
    """Pack columns (d, n), scaled, as panels (n / COLUMNS, d, COLUMNS)."""
    for j in range(x.shape[1]):
        panel, place = panels[j // COLUMNS], j % COLUMNS
        for p in range(len(x)):
            panel[p, place] = x[p, j] * scale


@njit_inlined()
def load_queries(q, at, stride, step, scale, left, rows, width):
    """Copy rows, scaled, from a flat array to another; `step` is from one number of a row to the next."""
    for i in range(rows):
        start, out = at + i * stride, left[i * width : (i + 1) * width]
        if step == 1:
            scale_row(q[start : start + width], scale, out)
        else:
            for p in range(width):
                out[p] = q[start + p * step] * scale


@njit_inlined()
def load_keys(k, at, stride, step, scale, panels, keys):
    """Pack keys, scaled, from a flat array as panels (keys / COLUMNS, width, COLUMNS); `step` as in `load_queries`."""
    for j in range(keys):
        start, panel = at + j * stride, panels[j // COLUMNS]
        if step == 1:
            key = k[start : start + panels.shape[1]]
            for p in range(panels.shape[1]):
                panel[p, j % COLUMNS] = key[p] * scale
        else:
            for p in range(panels.shape[1]):
                panel[p, j % COLUMNS] = k[start + p * step] * scale


@njit_inlined()
def allocate_plane(planes, packed):
    """Allocate the packed queries and keys of a matrix, none if they are packed already."""
    width, is_packed = packed.panels.shape[1], len(packed.panels) > 0
    rows, panels = (0, 0) if is_packed else (planes.queries + ROWS, -(-planes.keys // COLUMNS))
    return np.zeros(rows * width, np.float32), np.zeros((panels, width, COLUMNS), np.float32)


@njit_inlined()
def load_plane(planes, place, packed, left, panels):
    """Return the inputs of the scores of a matrix: those given if they are packed, else packed into `left` and `panels`."""
    if len(packed.panels):
        return packed
    _, q, k, q_stride, k_stride, q_step, k_step, position = planes.lines[place]
    width = panels.shape[1]
    load_queries(view_array(q, FAR, np.float32), 0, q_stride, q_step, ONE, left, planes.queries, width)
    load_keys(view_array(k, FAR, np.float32), 0, k_stride, k_step, planes.scale, panels, planes.keys)
    return ScoreInputs(left, width, panels, packed.softcap, packed.bias, planes.sinks[place], position)


@njit_inlined()
def allocate_buffers(plan):
    """Allocate the buffers for a block of a plan."""
    chunks, rows = plan.chunks, plan.rows
    return Buffers(
        np.empty((chunks, rows, STRIDE), np.float32),
        np.empty((chunks, rows), np.float32),
        np.empty((chunks, rows, 4)),
        np.empty((chunks, 3), np.int64),
    )


@njit_inlined()
def find_visible_columns(plan, line, first, rows, width):
    """Return the first column of a part of the table that any of some rows sees, and one past the last; (width, 0) for none."""
    at = plan.partial[line, 2] + first * width
    seen = np.zeros(width, np.bool_)
    for r in range(rows):
        merge_visible(seen, plan.table[at + r * width : at + (r + 1) * width])
    low, high = 0, width
    while low < width and not seen[low]:
        low += 1
    while high > low and not seen[high - 1]:
        high -= 1
    return (low, high) if low < width else (width, 0)


@njit_inlined()
def split_keys(plan, run, row, stop, keys):
    """Split the keys that some rows of a run see into chunks; return the number of chunks."""
    count = 0
    for line in range(plan.runs[run, 2], plan.runs[run, 3]):
        first, last = plan.ranges[line]
        low, high = first, last
        for part in range(plan.runs[run, 4], plan.runs[run, 5]):
            start, end = plan.partial[part, 0], plan.partial[part, 1]
            if (start == first) or (end == last):
                a, b = find_visible_columns(plan, part, row - plan.runs[run, 0], stop - row, end - start)
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


@njit_inlined()
def score_chunk(plan, scores, run, row, stop, c, buffers):
    """Compute the scores of one chunk, as the softmax takes them: capped, with bias and mask."""
    first, length, full = buffers.keys[c]
    depth = scores.panels.shape[1]
    for j in range(0, full, COLUMNS):
        for r in range(0, stop - row, ROWS):  # while the panel is in the L1 cache
            at, out = (first + j) * depth, (c * plan.rows + r) * STRIDE + j
            multiply_tile(
                scores.q, (row + r) * scores.stride, scores.stride, 1, scores.panels, at, depth, buffers.e, out, STRIDE
            )
    for r in range(stop - row):
        buffers.e[c, r, length:full] = LEAST
        s = buffers.e[c, r, :length]
        if scores.softcap > 0:
            cap_scores(s, scores.softcap)
        if len(scores.bias):
            bias = scores.bias[row + r - plan.runs[0, 0] if len(scores.bias) > 1 else 0]
            if len(bias) > 1:
                add_bias(s, bias[first : first + length])
            else:
                s += bias[0]
        for part in range(plan.runs[run, 4], plan.runs[run, 5]):
            start, end, at = plan.partial[part]
            low, high = max(start, first), min(end, first + length)
            if low < high:
                line = at + (row + r - plan.runs[run, 0]) * (end - start) - start
                hide_scores(s[low - first : high - first], plan.table[line + low : line + high])


@njit_inlined()
def multiply_chunk(products, row, stop, keys, out):
    """Compute the products of some rows with the keys of a chunk, (rows, STRIDE)."""
    first, _, full = keys
    depth = products.panels.shape[1]
    for j in range(0, full, COLUMNS):
        for r in range(0, stop - row, ROWS):
            at, panel = (row + r) * products.stride, (first + j) * depth
            multiply_tile(products.left, at, products.stride, 1, products.panels, panel, depth, out, r * STRIDE + j, STRIDE)


@njit_inlined()
def compute_softmax(plan, scores, run, row, stop, buffers, found):
    """Compute the exponentials of some rows in chunks, their factors, and the row statistics of `compiled_passes.NAMES`.

    The statistics go to `found` (NAMES, rows). Return the number of chunks.
    """
    count = split_keys(plan, run, row, stop, buffers.keys)
    tops = np.full(plan.rows, LEAST, np.float32)
    for c in range(count):
        score_chunk(plan, scores, run, row, stop, c, buffers)
        for r in range(stop - row):
            s = buffers.e[c, r, : buffers.keys[c, 2]]
            tops[r] = max(tops[r], find_maximum(buffers.e, (c * plan.rows + r) * STRIDE, len(s)))
            shift = max(tops[r], scores.sink)
            shift = shift if shift > LEAST else ZERO
            a, b, place = exponentiate_with_sums(s, shift)
            sums = buffers.sums[c, r]
            sums[0], sums[1], sums[2], sums[3] = shift, a, b, place + np.float64(a) * buffers.keys[c, 0]
    for r in range(stop - row):
        rescale_row(row + r, r, count, tops[r], scores, buffers, found)
    return count


@njit_inlined()
def rescale_row(row, r, count, top, scores, buffers, found):
    """Rescale the chunks of a row to one shift, and write the statistics of the row to `found`."""
    sink = scores.sink
    shift = max(top, sink)
    shift = shift if shift > LEAST else ZERO  # a row that sees nothing
    alone, weighted, place = 0.0, 0.0, 0.0
    for c in range(count):
        own, a, b, p = buffers.sums[c, r]
        factor = 1.0 if own == shift or a == 0 else math.exp(own - shift)
        buffers.factors[c, r] = factor
        alone += factor * a
        weighted += factor * (b + a * (own - shift))
        place += factor * p
    inverse = write_statistics(found[:, row], top, shift, sink, scores.position + row, alone, weighted, place)
    for c in range(count):
        buffers.factors[c, r] *= inverse


@njit_inlined()
def write_statistics(found, top, shift, sink, position, alone, weighted, place):
    """Write the first six statistics of a row to `found` (NAMES,); return 1 / its denominator, 0 if it sees nothing.

    `top` is the largest score; `alone`, `weighted` and `place` are the float64 sums of `exponentiate_with_sums` for `shift`.
    """
    below = alone + math.exp(sink - shift) if sink > LEAST else alone
    inverse = 1 / below if below != 0 else 0.0
    logarithm = math.log(below) if below > 0 else 0.0
    found[0], found[1] = shift, below
    found[2] = shift + logarithm if below != 0 else -np.inf
    found[3] = alone * inverse * logarithm - weighted * inverse
    found[4] = math.exp(top - shift) * inverse
    found[5] = (position * alone - place) * inverse
    return inverse


@njit_inlined()
def get_weight(key, r, count, buffers):
    """Return the weight of a row on a key, 0 if no chunk of the row holds the key."""
    for c in range(count):
        first, length, _ = buffers.keys[c]
        if first <= key < first + length:
            return buffers.e[c, r, key - first] * buffers.factors[c, r]
    return ZERO
