# mypy: ignore-errors
"""Rows of stored weights beside the softmax of their scores, in one call: in torch each of a dozen operations takes as long."""

import numpy as np

from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import view_array
from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.vectors import LEAST, ONE, REASSOCIATED, add_bias, dot, exponentiate_with_sums

NUMBER, BYTE = 4, 1  # bytes of an entry of float32 and of a table


@njit_inlined()
def locate(place, size, b, h, row):
    """Return the address of a row of entries of `size` bytes, of a tensor given by its address and its first three strides."""
    return place[0] + size * (b * place[1] + h * place[2] + row * place[3])


@njit_inlined(fastmath=REASSOCIATED)
def count_far(e, total, theirs, limit, slope):
    """Count the entries of e / total that are farther than limit + slope w from the weights w, or are no numbers."""
    count, factor = 0, ONE / total
    for j in range(len(e)):
        count += not abs(e[j] * factor - theirs[j]) - slope * theirs[j] <= limit
    return count


@njit_with_cache()
def are_rows_near(places, sizes, rows, scale, limit, slope):
    """Return whether each entry of softmax(scale q kᵀ + bias) is within limit + slope w of the weights w, at some rows.

    places (5, 4) are those of q, k, weights, bias and hidden: an address and the strides of batch, heads and rows, in entries.
    Their rows are contiguous; an address of 0 means no bias, or no hidden keys. sizes are the batch, heads, heads of k, keys
    and width; rows those of the weights, of bias and of q. hidden (b, h, number of rows, keys) is True where a key has no
    weight.
    """
    q, k, weights, bias, hidden = places
    batch, heads, shared, keys, width = sizes
    scores, scale = np.empty(keys, np.float32), np.float32(scale)
    limit, slope = np.float32(limit), np.float32(slope)
    for b in range(batch):
        for h in range(heads):
            for n in range(len(rows)):
                x = view_array(locate(q, NUMBER, b, h, rows[n]), width, np.float32)
                for j in range(keys):
                    scores[j] = scale * dot(x, view_array(locate(k, NUMBER, b, h * shared // heads, j), width, np.float32))
                if bias[0]:
                    add_bias(scores, view_array(locate(bias, NUMBER, b, h, rows[n]), keys, np.float32))
                if hidden[0]:
                    table = view_array(locate(hidden, BYTE, b, h, n), keys, np.uint8)
                    for j in range(keys):
                        scores[j] = LEAST if table[j] else scores[j]
                total = exponentiate_with_sums(scores, scores.max())[0]
                theirs = view_array(locate(weights, NUMBER, b, h, rows[n]), keys, np.float32)
                if count_far(scores, total, theirs, limit, slope):
                    return False
    return True
