# mypy: ignore-errors
"""Elementwise operations on a part of a row of scores: loops that the compiler vectorizes.

The exponential is 2^f by a polynomial of degree 5 on [-1/2, 1/2], relative error below 2e-7, times 2^n through the exponent
bits; the hyperbolic tangent is an odd polynomial near 0, and computed from the exponential elsewhere. NaN stays NaN.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.polynomial import Chebyshev, Polynomial

from regard.compiled.inlined import njit_inlined

REASSOCIATED = {"reassoc", "nsz", "arcp", "contract"}  # sums may be reordered; infinities and NaN are kept
LOG2E, LOWEST = np.float32(math.log2(math.e)), np.float32(-87.0)  # exp(-87) is near the smallest normal float32
C0, C1, C2, C3, C4, C5 = Chebyshev.interpolate(np.exp2, 5, domain=[-0.5, 0.5]).convert(kind=Polynomial).coef.astype(np.float32)
NEAR = np.float32(0.5)  # bound of the tangent's polynomial
T3, T5, T7, T9, T11, T13 = (np.float32(c) for c in (-1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075))
ZERO, HALF, ONE, LEAST = np.float32(0), np.float32(0.5), np.float32(1), np.float32(-np.inf)
REMAINDER = np.float32(8 * np.finfo(np.float32).eps)  # what a weight of 1 up to rounding leaves to others


@intrinsic
def reinterpret_as_float32(context, bits):
    """Reinterpret 32 bits as a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def reinterpret_as_int32(context, x):
    """Reinterpret a float32 as its 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit_inlined()
def find_largest_bits(x):
    """Return the bits of the largest magnitude of a vector of float32; those of inf or NaN if a number is not finite."""
    numbers, bits = x.view(np.int32), np.int32(0)
    for c in range(len(numbers)):  # a magnitude grows with its bits, and LLVM vectorizes the maximum of integers
        bits = max(bits, numbers[c] & np.int32(0x7FFFFFFF))
    return np.int32(bits)


@njit_inlined(inline="always")
def compute_power_of_two(exponent):
    """Compute 2**exponent in float32, for a whole number from -126 to 127."""
    return reinterpret_as_float32(np.int32((np.int32(exponent) + np.int32(127)) << np.int32(23)))


@njit_inlined(inline="always", fastmath=REASSOCIATED)
def exponential(x):
    """Compute exp(x) for x from -87 to 0."""
    y = x * LOG2E
    n = np.rint(y)
    f = y - n
    power = ((((C5 * f + C4) * f + C3) * f + C2) * f + C1) * f + C0
    return power * compute_power_of_two(n)


@njit_inlined(inline="always", fastmath=REASSOCIATED, error_model="numpy")  # numpy's error model divides without a check for 0
def hyperbolic_tangent(x):
    """Compute tanh(x)."""
    z = x * x
    near = x + x * z * (T3 + z * (T5 + z * (T7 + z * (T9 + z * (T11 + z * T13)))))
    size = abs(x)
    e = exponential(LOWEST if size > -HALF * LOWEST else -(size + size))
    far = (ONE - e) / (ONE + e)
    return near if size < NEAR else far if x > ZERO else -far


@njit_inlined(fastmath=REASSOCIATED)
def dot(a, b):
    """Compute the dot product of a and b."""
    total = ZERO
    for c in range(len(a)):
        total += np.float32(a[c]) * b[c]
    return total


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def cap_scores(s, softcap):
    """Replace s by softcap tanh(s / softcap)."""
    for j in range(len(s)):
        s[j] = softcap * hyperbolic_tangent(s[j] / softcap)


@njit_inlined(fastmath=REASSOCIATED)
def hide_scores(s, visible):
    """Set the scores s that are not visible to -inf."""
    for j in range(len(s)):
        s[j] = s[j] if visible[j] else LEAST


@njit_inlined(fastmath=REASSOCIATED)
def add_bias(s, bias):
    """Add bias to s in place."""
    for j in range(len(s)):
        s[j] += bias[j]


@njit_inlined(fastmath=REASSOCIATED)
def exponentiate_with_sums(s, shift):
    """Replace scores s by e = exp(s - shift); return the sums of e, of e (s - shift), and of e times its index in s."""
    a, b, c = ZERO, ZERO, ZERO
    for j in range(len(s)):
        z = s[j] - shift
        floored = LOWEST if z <= LOWEST else z
        e = ZERO if z <= LOWEST else exponential(floored)
        s[j] = e
        a += e
        b += e * floored
        c += e * np.float32(j)
    return a, b, c


@njit_inlined(fastmath=REASSOCIATED)
def fold_row(s, factor, summed, largest):
    """Add s · factor to `summed`, and raise `largest` to at least s · factor."""
    for j in range(len(s)):
        w = s[j] * factor
        summed[j] += w
        largest[j] = max(largest[j], w)


@njit_inlined(fastmath=REASSOCIATED)
def fold_four_rows(s, t, u, v, factors, summed, largest):
    """Fold four rows at once, as `fold_row` does one, reading and writing `summed` and `largest` a quarter as often."""
    f, g, h, i = factors
    for j in range(len(s)):
        w, x, y, z = s[j] * f, t[j] * g, u[j] * h, v[j] * i
        summed[j] += (w + x) + (y + z)
        largest[j] = max(max(largest[j], max(w, x)), max(y, z))


@njit_inlined(fastmath=REASSOCIATED)
def add_four_rows(s, t, u, v, factors, summed):
    """Add four rows, each times its factor, to `summed`, which is read and written once."""
    f, g, h, i = factors
    for j in range(len(s)):
        summed[j] += (s[j] * f + t[j] * g) + (u[j] * h + v[j] * i)


@njit_inlined(fastmath=REASSOCIATED)
def fold_signed_row(s, summed, largest, lowest):
    """Add s to `summed`, raise `largest` to at least s and `lowest` to at least -s."""
    for j in range(len(s)):
        summed[j] += s[j]
        largest[j] = max(largest[j], s[j])
        lowest[j] = max(lowest[j], -s[j])


@njit_inlined(fastmath=REASSOCIATED)
def sum_weighted(s, e, factor):
    """Multiply s by the weights e · factor in place; return the sum."""
    total = ZERO
    for j in range(len(s)):
        s[j] *= e[j] * factor
        total += s[j]
    return total


@njit_inlined(fastmath=REASSOCIATED)
def sum_visible(s, scores):
    """Set s to 0 where the score is -inf; return the sum."""
    total = ZERO
    for j in range(len(s)):
        s[j] = ZERO if scores[j] == LEAST else s[j]
        total += s[j]
    return total


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def sum_cut(s, e, factor, mean):
    """Replace s by -w / (1 - w) (s - mean), w = e · factor, or by -s where w is 1 up to rounding; return the sum."""
    total = ZERO
    for j in range(len(s)):
        w = e[j] * factor
        rest = ONE - w
        s[j] = -s[j] if rest <= REMAINDER else -w / rest * (s[j] - mean)
        total += s[j]
    return total


@njit_inlined(fastmath=REASSOCIATED)
def scale_row(x, factor, out):
    """Set `out` to x times a factor."""
    for j in range(len(out)):
        out[j] = x[j] * factor


@njit_inlined(fastmath=REASSOCIATED)
def add_scaled_row(s, factor, summed):
    """Add s · factor to `summed`."""
    for j in range(len(s)):
        summed[j] += s[j] * factor


@njit_inlined()
def merge_visible(seen, other):
    """Set seen to seen or other."""
    for j in range(len(seen)):
        seen[j] |= other[j]
