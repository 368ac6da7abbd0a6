# mypy: ignore-errors
"""Sums of the weights of one small matrix, compiled by numba, while it is in the cache."""

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.register_tiles import find_maximum
from regard.compiled.vectors import ONE, REASSOCIATED, ZERO, dot, scale_row


@njit_inlined()
def sum_near(rows, position, window, band, found):
    """Set `found` (q,) to the sums of rows (q, n) on keys at most `window` from the query, the first at `position`.

    band (q + n,) is room for numbers.
    """
    q = len(found)
    for t in range(len(band)):  # 1 for such keys, by key - query + q - 1
        band[t] = ONE if abs(t - (q - 1) - position) <= window else ZERO
    for i in range(q):
        found[i] = dot(rows[i], band[q - 1 - i : q - 1 - i + rows.shape[1]])


@njit_inlined()
def sum_marked(rows, marked, found):
    """Set `found` (q,) to the sums of rows (q, n) on the keys that are `marked` by 1, others by 0, float32 (n,)."""
    for i in range(len(found)):
        found[i] = dot(rows[i], marked)


@njit_inlined()
def sum_counted(rows, counted, keys):
    """Return the sums, float32 (keys,), of rows (q, keys or more) that are counted, (q,), accumulated in float64."""
    received = np.zeros(keys)
    for i in range(len(counted)):
        if counted[i]:
            for j in range(keys):
                received[j] += rows[i, j]
    return received.astype(np.float32)


@njit_inlined()
def find_heavy(received, real, first, count, values, is_stripe):
    """Mark the `count` keys that are real and receive most, except for the `first`; return the share of the `count` largest.

    Keys that receive nothing are not marked; of equal ones the first are. The share is that of the sum of all real keys, NaN
    if it is 0. values (n,), of full registers, is room for numbers.
    """
    total, largest, marked = 0.0, 0.0, 0
    for j in range(len(values)):
        values[j] = received[j] if j < len(real) and real[j] else ZERO
        total += values[j]
    is_stripe[:] = False
    for taken in range(count + 1):
        top = find_maximum(values, 0, len(values))
        if not top > ZERO or marked == count:
            break
        place = 0
        while values[place] != top:
            place += 1
        values[place] = 0
        if taken < count:
            largest += top
        if place != first:
            is_stripe[place] = True
            marked += 1
    return largest / total if total != 0 else np.nan


@njit_inlined()
def skew_rows(rows, counted, skewed):
    """Copy rows (q, n) that are counted, (q,), into `skewed` (q, q + n): its columns are distances, key - query + q - 1.

    What is not written has to be 0.
    """
    q, n = len(counted), rows.shape[1]
    for i in range(q):
        start = q - 1 - i
        scale_row(rows[i], ONE if counted[i] else ZERO, skewed[i, start : start + n])


@njit_inlined()
def sum_columns_and_squares(skewed, sums):
    """Set `sums` to the sums of the columns of `skewed`, a multiple of four rows, and return the sum of all squares."""
    total = 0.0
    sums[:] = 0
    for i in range(0, len(skewed), 4):
        total += add_four_rows_and_squares(skewed[i], skewed[i + 1], skewed[i + 2], skewed[i + 3], sums)
    return total


@njit_inlined(fastmath=REASSOCIATED)
def add_four_rows_and_squares(s, t, u, v, sums):
    """Add four rows to `sums` and return the sum of their squares."""
    total = 0.0
    for j in range(len(s)):
        w, x, y, z = np.float64(s[j]), np.float64(t[j]), np.float64(u[j]), np.float64(v[j])
        sums[j] += (w + x) + (y + z)
        total += (w * w + x * x) + (y * y + z * z)
    return total


@njit_inlined()
def count_by_distance(seen, at, stride, counted, pairs):
    """Set `pairs` (q + k - 1,) to the number of keys that are seen by counted queries, (q,), by key - query + q - 1.

    Row i of `seen` begins at at + i stride.
    """
    q, k = len(counted), len(pairs) - len(counted) + 1
    pairs[:] = 0
    for i in range(q):
        if counted[i]:
            for j in range(k):
                pairs[q - 1 - i + j] += seen[at + i * stride + j]


@njit_inlined(fastmath=REASSOCIATED, error_model="numpy")
def explain_by_distance(sums, pairs, squares, smallest):
    """Compute `weight_sums.explain_by_distance`; `smallest` is its SMALLEST_VARIANCE."""
    total, count, explained = 0.0, 0.0, 0.0
    for n in range(len(pairs)):
        total += sums[n]
        count += pairs[n]
        explained += sums[n] * sums[n] / max(pairs[n], 1.0)
    mean = total * total / count
    variance = squares - mean
    return (explained - mean) / variance if variance > smallest * squares else np.nan
