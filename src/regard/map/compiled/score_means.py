# mypy: ignore-errors
"""Means over the queries of one small matrix, of which scores of heads are made, compiled by numba."""

import math

import numpy as np

from regard.compiled.inlined import njit_inlined

PREVIOUS, ITSELF, FIRST, SINK, NEAR, DISTANCE, KEYS, STRIPES, ENTROPY, BREADTH = range(10)  # as in weight_sums.MEANS
ROWS_ENTROPY, ROWS_DISTANCE, ROWS_ITSELF, ROWS_PREVIOUS = 3, 5, 7, 8  # places in compiled_passes.NAMES


@njit_inlined()
def count_seen_keys(seen, at, stride, keys, position, window, counts):
    """Set the first two of counts (3, q) to how many keys each query sees, and how many at most `window` from its position.

    Row i of `seen` begins at at + i stride; the first query is at `position`.
    """
    for i in range(counts.shape[1]):
        row, every, near = at + i * stride, 0, 0
        for j in range(keys):
            every += seen[row + j]
        for j in range(max(position + i - window, 0), min(position + i + window + 1, keys)):
            near += seen[row + j]
        counts[0, i], counts[1, i] = every, near


@njit_inlined()
def count_common_keys(seen, at, stride, is_stripe, common):
    """Set `common` (q,) to how many of the stripes, bool (k,), each query sees; the table of seen keys as `count_seen_keys`."""
    common[:] = 0
    for j in range(len(is_stripe)):
        if is_stripe[j]:
            for i in range(len(common)):
                common[i] += seen[at + i * stride + j]


@njit_inlined(error_model="numpy")
def average_scores(rows, found, sums, table, query, means):
    """Set means (3, MEANS) to the mean of each score over the queries that it counts, to their number, and to its chance.

    Chance is the mean of a head that attends equally to all keys that a query sees; 0 for a score that has none. `found` are
    the statistics (NAMES, q) of rows (q, n), `sums` their weights (q,) on nearby keys and on stripes. `table` is that of seen
    keys, its first entry, stride and keys, how many keys, nearby keys and stripes a query sees, (3, q), and whether it counts.
    `query` is the position of the first one, the first token, and the weight above which that is a sink.
    """
    (near, stripes), (seen, at, stride, keys, counts, counted), (position, first, sink) = sums, table, query
    means[:] = 0
    for i in range(len(counted)):
        if not counted[i]:
            continue
        row, own, share, width = at + i * stride, position + i, 1 / np.float64(counts[0, i]), math.exp(found[ROWS_ENTROPY, i])
        if 0 < own <= keys and seen[row + own - 1]:
            add_query(means, PREVIOUS, found[ROWS_PREVIOUS, i], share)
        if 0 <= own < keys and seen[row + own]:
            add_query(means, ITSELF, found[ROWS_ITSELF, i], share)
        add_query(means, FIRST, rows[i, first], share * seen[row + first])
        add_query(means, SINK, 1.0 if rows[i, first] > sink else 0.0, 0.0)
        add_query(means, NEAR, near[i], share * counts[1, i])
        add_query(means, DISTANCE, found[ROWS_DISTANCE, i], 0.0)
        add_query(means, KEYS, width, 0.0)
        add_query(means, STRIPES, stripes[i], share * counts[2, i])
        add_query(means, ENTROPY, found[ROWS_ENTROPY, i], 0.0)
        add_query(means, BREADTH, width * share, 0.0)
    for n in range(means.shape[1]):
        means[0, n] /= means[1, n]
        means[2, n] /= means[1, n]


@njit_inlined()
def add_query(means, name, value, chance):
    """Add the value of a query and its chance to the sums of a score, and count the query."""
    means[0, name] += value
    means[1, name] += 1
    means[2, name] += chance
