# mypy: ignore-errors
"""The operands of the compiled attention loops: rows of numbers, and panels of rows in the layout of the register tiles.

float32 numbers are stored as they are, one to a slot. bfloat16 numbers are stored in pairs, two to a uint32 slot, for tiles
that multiply pairs: two neighbors of a row for sums along rows, one from each of two rows for sums over rows. `each` is how
many numbers a slot holds; a last slot with one number only is padded with 0.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from regard.compiled.halves import pair, pair_rows, put_row, read
from regard.compiled.registers import COLUMNS
from regard.compiled.vectors import LOWEST, ONE, REASSOCIATED, ZERO, exponential

NOTHING = np.uint16(0)


def each(x):
    """Return how many numbers a slot of x holds, of an array in memory or of one made by `made`: 1, or 2 for bfloat16."""


def made(x, shape):
    """Return an array of zeros, of slots for numbers of the dtype of x."""


def beside(scores, x):
    """Return the array for scores that are summed along rows: scores itself, or for bfloat16 a new array of pairs."""


def below(scores, x):
    """Return the array for scores that are summed over rows: scores itself, or for bfloat16 a new one, of pairs of two rows."""


def numbers(x):
    """View an array of slots as one of numbers."""


def across(x, place, step, count, width, panels):
    """Copy rows of x to panels (rows / COLUMNS, slots of a row, COLUMNS)."""


def along(x, place, step, count, width, panels):
    """Copy rows of x to panels (numbers of a row / COLUMNS, slots of a column, COLUMNS)."""


def bring(x, place, step, count, width, rows):
    """Copy rows of x to rows (rows, slots of a row), and set the other rows to 0."""


def kept(scores, r, first, last, rows):
    """Copy some scores of a row to the array that `beside` returned."""


def coupled(scores, rows, r, first, last, couples):
    """Copy some scores of two rows to the array that `beside` returned, and from there to the one that `below` returned."""


@overload(each, inline="always")
def each_of(x):
    """Return the implementation that numba compiles for these types."""
    return (lambda x: 2) if halved(x) else (lambda x: 1)


@overload(made)
def made_of(x, shape):
    """Return the implementation that numba compiles for these types."""
    return (lambda x, shape: np.zeros(shape, np.uint32)) if halved(x) else (lambda x, shape: np.zeros(shape, np.float32))


@overload(beside)
def beside_of(scores, x):
    """Return the implementation that numba compiles for these types."""

    def apart(scores, x):
        return np.zeros((scores.shape[0], scores.shape[1] // 2), np.uint32)

    return apart if halved(x) else (lambda scores, x: scores)


@overload(below)
def below_of(scores, x):
    """Return the implementation that numba compiles for these types."""

    def apart(scores, x):
        return np.zeros((scores.shape[0] // 2, scores.shape[1]), np.uint32)

    return apart if halved(x) else (lambda scores, x: scores)


@overload(numbers)
def numbers_of(x):
    """Return the implementation that numba compiles for these types."""
    return (lambda x: x.view(np.uint16)) if halved(x) else (lambda x: x)


@overload(across)
def across_of(x, place, step, count, width, panels):
    """Return the implementation that numba compiles for these types."""

    def pairs(x, place, step, count, width, panels):
        for j in range(count):
            row, panel, lane = x[place + j * step : place + j * step + width], panels[j // COLUMNS], j % COLUMNS
            for p in range(width // 2):
                panel[p, lane] = pair(row[2 * p], row[2 * p + 1])
            if width % 2:
                panel[width // 2, lane] = pair(row[width - 1], NOTHING)

    def whole(x, place, step, count, width, panels):
        for j in range(count):
            row, panel, lane = x[place + j * step : place + j * step + width], panels[j // COLUMNS], j % COLUMNS
            for p in range(width):
                panel[p, lane] = row[p]

    return pairs if halved(panels) else whole


@overload(along)
def along_of(x, place, step, count, width, panels):
    """Return the implementation that numba compiles for these types."""

    def pairs(x, place, step, count, width, panels):
        flat, deep, none = panels.ravel(), panels.shape[1], np.zeros(COLUMNS, np.uint16)
        for c in range(len(panels)):
            some, at, to = min(COLUMNS, width - c * COLUMNS), place + c * COLUMNS, c * deep * COLUMNS
            for j in range(0, count - 1, 2):
                pair_rows(x, at + j * step, x, at + j * step + step, flat, to + j // 2 * COLUMNS, some)
            if count % 2:
                pair_rows(x, at + (count - 1) * step, none, 0, flat, to + count // 2 * COLUMNS, some)

    def whole(x, place, step, count, width, panels):
        for c in range(len(panels)):
            some = min(COLUMNS, width - c * COLUMNS)
            for j in range(count):
                at = place + j * step + c * COLUMNS
                copy(x[at : at + some], panels[c, j])

    return pairs if halved(panels) else whole


@overload(bring)
def bring_of(x, place, step, count, width, rows):
    """Return the implementation that numba compiles for these types."""

    def brought(x, place, step, count, width, rows):
        taken = numbers(rows)
        for r in range(count):
            copy(x[place + r * step : place + r * step + width], taken[r])
        rows[count:] = 0

    return brought


@overload(kept)
def kept_of(scores, r, first, last, rows):
    """Return the implementation that numba compiles for these types."""

    def rounded(scores, r, first, last, rows):
        stride = scores.shape[1]
        put_row(scores, r * stride + first, ONE, numbers(rows), r * stride + first, last - first)

    return rounded if halved(rows) else (lambda scores, r, first, last, rows: None)


@overload(coupled)
def coupled_of(scores, rows, r, first, last, couples):
    """Return the implementation that numba compiles for these types."""

    def pairs(scores, rows, r, first, last, couples):
        kept(scores, r, first, last, rows)
        kept(scores, r + 1, first, last, rows)
        stride, halves = scores.shape[1], numbers(rows)
        upper = r * stride + first
        pair_rows(halves, upper, halves, upper + stride, couples, r // 2 * stride + first, last - first)

    return pairs if halved(couples) else (lambda scores, rows, r, first, last, couples: None)


def halved(x):
    """Return whether an array's type is that of bfloat16 numbers, single (uint16) or in pairs (uint32)."""
    return x.dtype in (types.uint16, types.uint32)


@njit(nogil=True)
def copy(x, out):
    """Copy the numbers of x to the start of out."""
    for p in range(len(x)):
        out[p] = x[p]


@njit(fastmath=REASSOCIATED, nogil=True)
def scaled(s, scale):
    """Multiply s by a number in place."""
    for j in range(len(s)):
        s[j] *= scale


@njit(fastmath=REASSOCIATED, nogil=True)
def exponentiate(s, shift):
    """Replace s by exp(s - shift) and return the sum."""
    total = ZERO
    for j in range(len(s)):
        z = s[j] - shift
        e = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)
        s[j] = e
        total += e
    return total


@njit(fastmath=REASSOCIATED, nogil=True)
def slope(s, x, log, delta, scale):
    """Replace scores s by weights w, and x, the gradients of the weights, by those of the scores, w (x - delta) scale."""
    for j in range(len(s)):
        z = min(s[j] - log, ZERO)
        w = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)
        s[j] = w
        x[j] = w * (x[j] - delta) * scale


@njit(fastmath=REASSOCIATED, nogil=True)
def dot(x, y):
    """Compute the dot product of two rows in memory."""
    total = ZERO
    for p in range(len(x)):
        total += read(x[p]) * read(y[p])
    return total
