# mypy: ignore-errors
"""The softmax of each query over the keys of a cache, compiled by numba: a key enters at its position and leaves at its end.

The keys of a block of queries lie in slots, packed for `multiply_tile`. The slot of a key that no later query sees goes to
another, so that a block packs only the keys that are new.
"""

import math

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, find_maximum, multiply_tile
from regard.compiled.vectors import LEAST, REASSOCIATED, ZERO, cap_scores, exponentiate_with_sums
from regard.policy_audit.row_measures import LEAST_DROPPED

BLOCK = 2 * ROWS  # queries


@njit_inlined()
def fill_slots(k, v, ends, row, first, last, slots, panels, values, used):
    """Store the keys first to last that are seen from position `row` on, in slots that no key holds any more.

    slots (2, capacity): the key and its end. panels (capacity / COLUMNS, d, COLUMNS), values (panels of e, capacity, COLUMNS).
    Return the number of slots up to the last one that was ever used.
    """
    free = 0
    for j in range(first, last):
        if ends[j] <= max(row, j):
            continue
        while free < used and slots[1, free] > row:
            free += 1
        slots[0, free], slots[1, free] = j, ends[j]
        for c in range(k.shape[1]):
            panels[free // COLUMNS, c, free % COLUMNS] = k[j, c]
        for c in range(v.shape[1]):
            values[c // COLUMNS, free, c % COLUMNS] = v[j, c]
        used = max(used, free + 1)
    return used


@njit_inlined(fastmath=REASSOCIATED)
def hide_slots(s, keys, ends, row):
    """Set the scores of a query at position `row` to -inf in slots whose key it does not see; return how many it sees."""
    count = np.int32(0)
    for n in range(len(s)):
        is_seen = (keys[n] <= row) & (row < ends[n])
        s[n] = s[n] if is_seen else LEAST
        count += np.int32(is_seen)
    return count


@njit_inlined(fastmath=REASSOCIATED)
def sum_distances(e, keys, row):
    """Sum numbers e times the distance of their keys from a query at position `row`."""
    total = ZERO
    for n in range(len(e)):
        total += e[n] * np.float32(row - keys[n])
    return total


@njit_with_cache()
def attend_to_slots(q, k, v, ends, first, last, stop, capacity, softcap, shift, total, distance, context, counts):
    """Compute the softmax of the queries first to last over the keys before `stop` that they see.

    q (t, d), scaled, k (t, d), v (t, e), ends (t,) int32. capacity is the largest number of slots, a multiple of COLUMNS.
    Written are the denominators, shift and total (t,), the mean distances (t,), the contexts (t, e), and the numbers of keys,
    counts (t,); a query that sees no key has the total 0 and the context 0.
    """
    depth, width, stride = k.shape[1], -(-v.shape[1] // COLUMNS), capacity + COLUMNS
    slots = np.zeros((2, capacity), np.int32)
    panels = np.zeros((capacity // COLUMNS, depth, COLUMNS), np.float32)
    values = np.zeros((width, capacity, COLUMNS), np.float32)
    some, e = np.zeros((BLOCK, depth), np.float32), np.zeros((BLOCK, stride), np.float32)
    products, below = np.empty((ROWS, COLUMNS), np.float32), np.empty(BLOCK, np.float32)
    used = fill_slots(k, v, ends, first, 0, min(first, stop), slots, panels, values, 0)
    for row in range(first, last, BLOCK):
        end = min(row + BLOCK, last)
        used = fill_slots(k, v, ends, row, min(row, stop), min(end, stop), slots, panels, values, used)
        some[: end - row] = q[row:end]
        full = -(-used // COLUMNS) * COLUMNS
        for n in range(0, full, COLUMNS):
            for r in range(0, end - row, ROWS):
                multiply_tile(some, r * depth, depth, 1, panels, n * depth, depth, e, r * stride + n, stride)
        for r in range(end - row):
            s = e[r, :full]
            if softcap > 0:
                cap_scores(s, softcap)
            counts[row + r] = hide_slots(s, slots[0, :full], slots[1, :full], np.int32(row + r))
            top = find_maximum(e, r * stride, full)
            top = top if top > LEAST else ZERO
            shift[row + r] = top
            total[row + r] = exponentiate_with_sums(s, top)[0]
            below[r] = 1 / total[row + r] if counts[row + r] else ZERO
            distance[row + r] = sum_distances(s, slots[0, :full], np.int32(row + r)) * below[r]
        for panel in range(width):
            left, right = panel * COLUMNS, min((panel + 1) * COLUMNS, v.shape[1])
            for r in range(0, end - row, ROWS):
                multiply_tile(e, r * stride, stride, 1, values, panel * capacity * COLUMNS, used, products, 0, COLUMNS)
                for i in range(r, min(r + ROWS, end - row)):
                    for c in range(left, right):
                        context[row + i, c] = products[i - r, c - left] * below[i]


@njit_with_cache()
def add_keys(shift, total, distance, context, other_shift, other_total, other_distance, other_context):
    """Change the softmax of some rows over some keys, in place, to that over these and other keys.

    Given are the denominators and mean distances (n,) and the contexts (n, e) of both.
    """
    for i in range(len(shift)):
        if other_total[i] == 0:
            continue
        if total[i] == 0:
            shift[i], total[i] = other_shift[i], other_total[i]
            distance[i], context[i] = other_distance[i], other_context[i]
            continue
        top = max(shift[i], other_shift[i])
        ours, theirs = math.exp(shift[i] - top) * total[i], math.exp(other_shift[i] - top) * other_total[i]
        shift[i], total[i] = top, ours + theirs
        a, b = np.float32(ours / (ours + theirs)), np.float32(theirs / (ours + theirs))
        distance[i] = a * distance[i] + b * other_distance[i]
        for c in range(context.shape[1]):
            context[i, c] = a * context[i, c] + b * other_context[i, c]


@njit_with_cache()
def compare_softmax(whole, kept, counts, kept_counts, kl, recall, error, dropped):
    """Write KL, recall, the error of the output and the mean distance of what is dropped, of some rows.

    whole and kept are the softmax over all keys and over those kept: shift, total, distance (n,) and context (n, e). Rows that
    keep as many keys as there are drop nothing.
    """
    shift, total, distance, context = whole
    kept_shift, kept_total, kept_distance, kept_context = kept
    for i in range(len(kl)):
        if counts[i] == kept_counts[i]:
            kl[i], recall[i], error[i] = 0, 1, 0
            continue
        # a quotient near 1 and a difference near 0 keep the digits that log-sum-exp has lost where scores are large
        nats = math.log(np.float64(total[i]) / np.float64(kept_total[i])) + (shift[i] - kept_shift[i])
        kl[i] = max(nats, 0.0)
        recall[i] = math.exp(-kl[i])
        share = -math.expm1(-max(nats, 0.0))
        if share > LEAST_DROPPED:
            dropped[i] = (distance[i] - (1 - share) * kept_distance[i]) / share
        size, change = 0.0, 0.0
        for c in range(context.shape[1]):
            size += np.float64(context[i, c]) * context[i, c]
            change += (np.float64(kept_context[i, c]) - context[i, c]) ** 2
        error[i] = math.sqrt(change / size) if size > 0 else math.sqrt(change)
