"""One pass over rows of scores, compiled by numba: their softmax, and all that an overview says of it.

The exponential is a polynomial that the compiler can put into vector registers: 2^f by degree 6 on [-1/2, 1/2], relative
error below 2e-7, times 2^n through the bits of the exponent.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

REASSOCIATED = {"reassoc", "nsz", "arcp", "contract"}  # sums in any order; infinities and NaN keep their meaning
LOG2E, LOWEST = np.float32(math.log2(math.e)), np.float32(-87.0)  # exp(-87) is the least float32 that is not denormal
TAYLOR = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(7))
C0, C1, C2, C3, C4, C5, C6 = TAYLOR
ZERO, HALF, LEAST = np.float32(0), np.float32(0.5), np.float32(-np.inf)
CHUNK, LANES = 512, 64  # keys whose float32 sums are kept apart; numbers compared side by side


@intrinsic
def as_float(context, bits):
    """The float32 of these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always", fastmath=REASSOCIATED)
def exponential(x):
    """exp(x) of an x from -87 to 0."""
    y = x * LOG2E
    n = np.floor(y + HALF)
    f = y - n
    power = ((((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1) * f) + C0
    return power * as_float(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(fastmath=REASSOCIATED, nogil=True, cache=True)
def highest(s, lanes):
    """The largest score of a row, found in as many lanes side by side as there is room for."""
    lanes[:] = LEAST
    for start in range(0, len(s), len(lanes)):
        part = s[start : start + len(lanes)]
        for j in range(len(part)):
            lanes[j] = max(lanes[j], part[j])
    return lanes.max()


@njit(fastmath=REASSOCIATED, nogil=True, cache=True)
def exponentiate(s, keys, shift):
    """exp(s - shift) in the place of a row's scores s; the sums of these e, of e (s - shift) and of e times the key."""
    total, weighted, place = 0.0, 0.0, 0.0
    for start in range(0, len(s), CHUNK):
        part, names = s[start : start + CHUNK], keys[start : start + CHUNK]  # slices: only so are they put into vectors
        a, b, c = ZERO, ZERO, ZERO
        first = names[0]
        for j in range(len(part)):
            z = part[j] - shift
            floored = max(z, LOWEST)
            e = exponential(floored) if z > LOWEST else ZERO
            part[j] = e
            a += e
            b += e * floored
            c += e * (names[j] - first)
        total += a
        weighted += b
        place += c + np.float64(a) * first
    return total, weighted, place


@njit(fastmath=REASSOCIATED, nogil=True, cache=True)
def weigh(s, inverse, summed, largest):
    """s · inverse in the place of a row s, added to one row and compared with another."""
    for j in range(len(s)):
        w = s[j] * inverse
        s[j] = w
        summed[j] += w
        largest[j] = max(largest[j], w)


@njit(nogil=True, cache=True)
def flush(summed, largest, parts, received, total, most):
    """Hands the sums and the maxima of some rows (m,) on to the columns and to a row of the picture, and begins anew."""
    for part in range(len(parts) - 1):
        a, b = ZERO, ZERO
        for j in range(parts[part], parts[part + 1]):
            received[j] += summed[j]
            a += summed[j]
            b = max(b, largest[j])
        total[part] += a
        most[part] = max(most[part], b)
    summed[:] = ZERO
    largest[:] = ZERO


@njit(inline="always")
def weight_on(s, keys, key):
    """The weight of a row on a key, 0 where the row has none for it."""
    place = np.searchsorted(keys, np.float32(key))
    return s[place] if place < len(keys) and keys[place] == key else ZERO


@njit(nogil=True, cache=True)
def rows(scores, keys, position, sink, parts, bins, found, received, total, most):
    """Rows of scores (n, m) one after the other; `fast.NAMES` says what stands where in found (n, 8)."""
    summed, largest, lanes = np.zeros(len(keys), np.float32), np.zeros(len(keys), np.float32), np.zeros(LANES, np.float32)
    for r in range(len(scores)):
        s = scores[r]
        top = highest(s, lanes)
        shift = max(top, sink) if max(top, sink) > LEAST else ZERO  # of a blind row
        alone, weighted, place = exponentiate(s, keys, shift)
        below = alone + math.exp(sink - shift) if sink > LEAST else alone
        inverse = 1 / below if below > 0 else 0.0
        found[r, 0], found[r, 1] = shift, below
        found[r, 2] = alone * inverse * math.log(below) - weighted * inverse if below > 0 else 0.0
        found[r, 3] = math.exp(top - shift) * inverse
        weigh(s, np.float32(inverse), summed, largest)
        own = position + r
        found[r, 4] = (own * alone - place) * inverse
        found[r, 5], found[r, 6], found[r, 7] = weight_on(s, keys, 0), weight_on(s, keys, own), weight_on(s, keys, own - 1)
        if r + 1 == len(scores) or bins[r + 1] != bins[r]:
            flush(summed, largest, parts, received, total[bins[r]], most[bins[r]])


@njit(parallel=True, nogil=True, cache=True)
def traverse(scores, keys, position, sink, parts, bins, found, received, total, most):
    """Rows of scores (n, m), shared among as many threads as received, total and most have places for."""
    threads, n = len(received), len(scores)
    for t in prange(threads):
        i, j = t * n // threads, (t + 1) * n // threads
        rows(scores[i:j], keys, position + i, sink, parts, bins[i:j], found[i:j], received[t], total[t], most[t])
