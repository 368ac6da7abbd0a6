# mypy: ignore-errors
"""What the compiled loops of attention multiply: rows of numbers, and panels of rows, as the tiles of registers read them.

Numbers that are float32 in memory stay so. Those that are bfloat16 lie two to a place, as a uint32, for tiles that multiply
pairs: two of a row where it is summed along rows, one of each of two rows where it is summed over these. `each` is how many
numbers a place has; a last place that has but one holds 0 beside it.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from regard.compiled.halves import pair, pair_rows, put_row, read
from regard.compiled.registers import COLUMNS
from regard.compiled.vectors import LOWEST, ONE, REASSOCIATED, ZERO, exponential

NOTHING = np.uint16(0)


def each(x):
    """How many numbers a place has, of an array in memory or of one made for it: 1, or of bfloat16 2."""


def made(x, shape):
    """Room for places, of numbers like those of x: 0 everywhere."""


def beside(scores, x):
    """Where scores go for sums along their rows: they stay, or lie as numbers like those of x in an array of their own."""


def below(scores, x):
    """Where they go for sums over rows: they stay, or lie in pairs of two rows in an array of their own."""


def numbers(x):
    """An array of places as one of numbers."""


def across(x, place, step, count, width, panels):
    """Rows of x as panels (rows / COLUMNS, places of a row, COLUMNS)."""


def along(x, place, step, count, width, panels):
    """Rows of x as panels (numbers of a row / COLUMNS, places of a column, COLUMNS)."""


def bring(x, place, step, count, width, rows):
    """Rows of x, (rows, places of a row); the others 0."""


def kept(scores, r, first, last, rows):
    """Brings some scores of a row to what `beside` made."""


def coupled(scores, rows, r, first, last, couples):
    """Brings some scores of two rows to what `beside` made, and from there to what `below` made."""


@overload(each, inline="always")
def each_of(x):
    """What numba compiles of it."""
    return (lambda x: 2) if halved(x) else (lambda x: 1)


@overload(made)
def made_of(x, shape):
    """What numba compiles of it."""
    return (lambda x, shape: np.zeros(shape, np.uint32)) if halved(x) else (lambda x, shape: np.zeros(shape, np.float32))


@overload(beside)
def beside_of(scores, x):
    """What numba compiles of it."""

    def apart(scores, x):
        return np.zeros((scores.shape[0], scores.shape[1] // 2), np.uint32)

    return apart if halved(x) else (lambda scores, x: scores)


@overload(below)
def below_of(scores, x):
    """What numba compiles of it."""

    def apart(scores, x):
        return np.zeros((scores.shape[0] // 2, scores.shape[1]), np.uint32)

    return apart if halved(x) else (lambda scores, x: scores)


@overload(numbers)
def numbers_of(x):
    """What numba compiles of it."""
    return (lambda x: x.view(np.uint16)) if halved(x) else (lambda x: x)


@overload(across)
def across_of(x, place, step, count, width, panels):
    """What numba compiles of it."""

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
    """What numba compiles of it."""

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
    """What numba compiles of it."""

    def brought(x, place, step, count, width, rows):
        taken = numbers(rows)
        for r in range(count):
            copy(x[place + r * step : place + r * step + width], taken[r])
        rows[count:] = 0

    return brought


@overload(kept)
def kept_of(scores, r, first, last, rows):
    """What numba compiles of it."""

    def rounded(scores, r, first, last, rows):
        stride = scores.shape[1]
        put_row(scores, r * stride + first, ONE, numbers(rows), r * stride + first, last - first)

    return rounded if halved(rows) else (lambda scores, r, first, last, rows: None)


@overload(coupled)
def coupled_of(scores, rows, r, first, last, couples):
    """What numba compiles of it."""

    def pairs(scores, rows, r, first, last, couples):
        kept(scores, r, first, last, rows)
        kept(scores, r + 1, first, last, rows)
        stride, halves = scores.shape[1], numbers(rows)
        upper = r * stride + first
        pair_rows(halves, upper, halves, upper + stride, couples, r // 2 * stride + first, last - first)

    return pairs if halved(couples) else (lambda scores, rows, r, first, last, couples: None)


def halved(x):
    """Whether an array's type is that of pairs, or of bfloat16 in memory."""
    return x.dtype in (types.uint16, types.uint32)


@njit(nogil=True)
def copy(x, out):
    """The numbers of x in the first ones of out."""
    for p in range(len(x)):
        out[p] = x[p]


@njit(fastmath=REASSOCIATED, nogil=True)
def scaled(s, scale):
    """s times a number, in its place."""
    for j in range(len(s)):
        s[j] *= scale


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
def slope(s, x, log, delta, scale):
    """Weights w in the place of scores s, and w (x - delta) scale, the gradient of the scores, in that of x, the weights'."""
    for j in range(len(s)):
        z = min(s[j] - log, ZERO)
        w = ZERO if z <= LOWEST else exponential(LOWEST if z <= LOWEST else z)
        s[j] = w
        x[j] = w * (x[j] - delta) * scale


@njit(fastmath=REASSOCIATED, nogil=True)
def dot(x, y):
    """The sum of the products of two rows in memory."""
    total = ZERO
    for p in range(len(x)):
        total += read(x[p]) * read(y[p])
    return total
