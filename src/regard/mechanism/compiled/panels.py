# mypy: ignore-errors
"""The operands of the compiled attention loops: rows of numbers, and panels of rows in the layout of the register tiles.

float32 numbers are stored as they are, one to a slot. bfloat16 numbers are stored in pairs, two to a uint32 slot, for tiles
that multiply pairs: two neighbors of a row for sums along rows, one from each of two rows for sums over rows. A last
slot with one number only is padded with 0.
"""

import numpy as np
from numba import types
from numba.extending import overload

from regard.compiled.bfloat16 import convert_to_float32, pack_pair, pack_row_pairs, store_scaled_row
from regard.compiled.inlined import njit_inlined
from regard.compiled.register_tiles import COLUMNS
from regard.compiled.vectors import LOWEST, ONE, REASSOCIATED, ZERO, exponential

NOTHING = np.uint16(0)


def numbers_per_slot(x):
    """Return how many numbers a slot of x holds, of an array in memory or of one of slots: 1, or 2 for bfloat16."""


def allocate_slots(x, shape):
    """Return an array of zeros, of slots for numbers of the dtype of x."""


def allocate_row_operand(scores, x):
    """Return the array for scores that are summed along rows: scores itself, or for bfloat16 a new array of pairs."""


def allocate_column_operand(scores, x):
    """Return the array for scores that are summed over rows: scores itself, or for bfloat16 a new one, of pairs of two rows."""


def view_numbers(x):
    """View an array of slots as one of numbers."""


def pack_transposed_panels(x, place, step, count, width, panels):
    """Copy rows of x to panels (rows / COLUMNS, slots of a row, COLUMNS)."""


def pack_panels(x, place, step, count, width, panels):
    """Copy rows of x to panels (numbers of a row / COLUMNS, slots of a column, COLUMNS)."""


def copy_score_pairs(scores, rows, r, first, last, couples):
    """Copy some scores of two rows to the operand that is summed along rows, and from there to the one summed over rows."""


@overload(numbers_per_slot, inline="always")
def overload_numbers_per_slot(x):
    """Return the implementation that numba compiles for these types."""
    return (lambda x: 2) if is_bfloat16(x) else (lambda x: 1)


@overload(allocate_slots)
def overload_allocate_slots(x, shape):
    """Return the implementation that numba compiles for these types."""
    return (lambda x, shape: np.zeros(shape, np.uint32)) if is_bfloat16(x) else (lambda x, shape: np.zeros(shape, np.float32))


@overload(allocate_row_operand)
def overload_allocate_row_operand(scores, x):
    """Return the implementation that numba compiles for these types."""

    def allocate_pairs(scores, x):
        return np.zeros((scores.shape[0], scores.shape[1] // 2), np.uint32)

    return allocate_pairs if is_bfloat16(x) else (lambda scores, x: scores)


@overload(allocate_column_operand)
def overload_allocate_column_operand(scores, x):
    """Return the implementation that numba compiles for these types."""

    def allocate_pairs(scores, x):
        return np.zeros((scores.shape[0] // 2, scores.shape[1]), np.uint32)

    return allocate_pairs if is_bfloat16(x) else (lambda scores, x: scores)


@overload(view_numbers)
def overload_view_numbers(x):
    """Return the implementation that numba compiles for these types."""
    return (lambda x: x.view(np.uint16)) if is_bfloat16(x) else (lambda x: x)


@overload(pack_transposed_panels)
def overload_pack_transposed_panels(x, place, step, count, width, panels):
    """Return the implementation that numba compiles for these types."""

    def pack_pairs(x, place, step, count, width, panels):
        for j in range(count):
            row, panel, lane = x[place + j * step : place + j * step + width], panels[j // COLUMNS], j % COLUMNS
            for p in range(width // 2):
                panel[p, lane] = pack_pair(row[2 * p], row[2 * p + 1])
            if width % 2:
                panel[width // 2, lane] = pack_pair(row[width - 1], NOTHING)

    def pack_singles(x, place, step, count, width, panels):
        for j in range(count):
            row, panel, lane = x[place + j * step : place + j * step + width], panels[j // COLUMNS], j % COLUMNS
            for p in range(width):
                panel[p, lane] = row[p]

    return pack_pairs if is_bfloat16(panels) else pack_singles


@overload(pack_panels)
def overload_pack_panels(x, place, step, count, width, panels):
    """Return the implementation that numba compiles for these types."""

    def pack_pairs(x, place, step, count, width, panels):
        flat, deep, none = panels.ravel(), panels.shape[1], np.zeros(COLUMNS, np.uint16)
        for c in range(len(panels)):
            some, at, to = min(COLUMNS, width - c * COLUMNS), place + c * COLUMNS, c * deep * COLUMNS
            for j in range(0, count - 1, 2):
                pack_row_pairs(x, at + j * step, x, at + j * step + step, flat, to + j // 2 * COLUMNS, some)
            if count % 2:
                pack_row_pairs(x, at + (count - 1) * step, none, 0, flat, to + count // 2 * COLUMNS, some)

    def pack_singles(x, place, step, count, width, panels):
        for c in range(len(panels)):
            some = min(COLUMNS, width - c * COLUMNS)
            for j in range(count):
                at = place + j * step + c * COLUMNS
                copy_numbers(x[at : at + some], panels[c, j])

    return pack_pairs if is_bfloat16(panels) else pack_singles


@overload(copy_score_pairs)
def overload_copy_score_pairs(scores, rows, r, first, last, couples):
    """Return the implementation that numba compiles for these types."""

    def copy_pairs(scores, rows, r, first, last, couples):
        stride, halves, upper, count = scores.shape[1], view_numbers(rows), r * scores.shape[1] + first, last - first
        store_scaled_row(scores, upper, ONE, halves, upper, count)
        store_scaled_row(scores, upper + stride, ONE, halves, upper + stride, count)
        pack_row_pairs(halves, upper, halves, upper + stride, couples, r // 2 * stride + first, count)

    return copy_pairs if is_bfloat16(couples) else (lambda scores, rows, r, first, last, couples: None)


def is_bfloat16(x):
    """Return whether an array's type is that of bfloat16 numbers, single (uint16) or in pairs (uint32)."""
    return x.dtype in (types.uint16, types.uint32)


@njit_inlined()
def load_rows(x, place, step, count, width, rows):
    """Copy rows of x to rows (rows, slots of a row), and set the other rows to 0."""
    taken = view_numbers(rows)
    for r in range(count):
        copy_numbers(x[place + r * step : place + r * step + width], taken[r])
    rows[count:] = 0


@njit_inlined()
def copy_numbers(x, out):
    """Copy the numbers of x to the start of out."""
    for p in range(len(x)):
        out[p] = x[p]


@njit_inlined(fastmath=REASSOCIATED)
def scale_scores(s, scale):
    """Multiply s by a number in place."""
    for j in range(len(s)):
        s[j] *= scale


@njit_inlined(fastmath=REASSOCIATED)
def compute_score_gradients(s, x, log, delta, scale):
    """Replace scores s by weights w, and x, the gradients of the weights, by those of the scores, w (x - delta) scale."""
    for j in range(len(s)):
        z = min(s[j] - log, ZERO)
        w = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)
        s[j] = w
        x[j] = w * (x[j] - delta) * scale


@njit_inlined(fastmath=REASSOCIATED)
def dot_stored_rows(x, y):
    """Compute the dot product of two rows in memory."""
    total = ZERO
    for p in range(len(x)):
        total += convert_to_float32(x[p]) * convert_to_float32(y[p])
    return total
