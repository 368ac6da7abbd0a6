# mypy: ignore-errors
"""The weights and all statistics of many small matrices, compiled by numba: a thread takes one matrix after another.

A matrix is scored and put through the softmax in the L1 cache, and only what is asked for goes to memory.
"""

import ctypes

import numpy as np
from numba import njit

from regard.compiled.intrinsics import atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, find_maximum, multiply_tile
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import (
    LEAST,
    REASSOCIATED,
    ZERO,
    add_bias,
    cap_scores,
    exponentiate_with_sums,
    hide_scores,
)
from regard.map.compiled.blocks import write_statistics

FAR = 2**40  # beyond the end of any array


class PlaneArguments(Arguments):
    """The count of matrices taken so far; the sizes; the strides of batch, heads and rows; the addresses of the arrays.

    strides are those of q, k, the bias and the mask's table; pairs (units, 2) are batch rows and heads.
    """

    _fields_ = [  # noqa: RUF012  # as ctypes has it
        *integer_fields("taken units share queries keys width statistics"),
        ("strides", ctypes.c_int64 * 12),
        *integer_fields("pairs positions q k bias seen sinks weights found received"),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


FIELDS = np.dtype(PlaneArguments)


@callback_with_cache(PlaneArguments)
def summarize_planes(place):
    """Compute the weights (units, q, k), the statistics of `compiled_passes.NAMES`, (names, units, q), and the column sums.

    softcap is 0 for none; bias, seen, sinks and weights are absent if their address is 0.
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
    while True:
        unit = atomic_increment(place)
        if unit >= a.units:
            return
        b, h = pairs[unit]
        load_queries(view_array(a.q, FAR, np.float32), b * strides[0] + h * strides[1], strides[2], a.scale, left, q, width)
        load_keys(view_array(a.k, FAR, np.float32), b * strides[3] + h // a.share * strides[4], strides[5], panels, k)
        for j in range(0, columns, COLUMNS):
            for i in range(0, rows, ROWS):
                multiply_tile(left, i * width, width, 1, panels, j * width, width, scores, i * columns + j, columns)
        sink = sinks[h] if len(sinks) else LEAST
        summed[:] = 0
        for i in range(q):
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
            inverse = summarize_row(scores, i, sink, positions[unit] + i, found[:, unit, i])
            scale_and_add(row, inverse, summed)
            for name, key in ((6, 0), (7, positions[unit] + i), (8, positions[unit] + i - 1)):
                found[name, unit, i] = row[key] if 0 <= key < k else ZERO
            if len(weights):
                weights[unit, i] = row[:k]
        received[unit] = summed[:k]


@njit(nogil=True)
def load_queries(q, at, stride, scale, left, rows, width):
    """Copy rows, scaled, from a flat array to another."""
    for i in range(rows):
        scale_row(q[at + i * stride : at + i * stride + width], scale, left[i * width : (i + 1) * width])


@njit(fastmath=REASSOCIATED, nogil=True)
def scale_row(x, factor, out):
    """Set `out` to x times a factor."""
    for j in range(len(out)):
        out[j] = x[j] * factor


@njit(nogil=True)
def load_keys(k, at, stride, panels, keys):
    """Pack keys from a flat array as panels (keys / COLUMNS, width, COLUMNS)."""
    for j in range(keys):
        key, panel = k[at + j * stride : at + j * stride + panels.shape[1]], panels[j // COLUMNS]
        for p in range(panels.shape[1]):
            panel[p, j % COLUMNS] = key[p]


@njit(nogil=True)
def summarize_row(scores, i, sink, position, found):
    """Exponentiate row i of the scores in place, padded with -inf, and write its statistics; return 1 / their sum."""
    s = scores[i]
    top = find_maximum(scores, i * len(s), len(s))
    shift = max(top, sink)
    shift = shift if shift > LEAST else ZERO  # a row that sees nothing
    alone, weighted, place = exponentiate_with_sums(s, shift)
    sums = np.float64(alone), np.float64(weighted), np.float64(place)
    return np.float32(write_statistics(found, top, shift, sink, position, *sums))


@njit(fastmath=REASSOCIATED, nogil=True)
def scale_and_add(e, factor, summed):
    """Multiply e by a factor in place, and add it to `summed`."""
    for j in range(len(e)):
        e[j] *= factor
        summed[j] += e[j]
