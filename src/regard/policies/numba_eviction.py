# mypy: ignore-errors
"""The cache of `cache_replay.py` compiled by numba, for causal attention in float32 on a CPU without sinks and softcap."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit

from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.vectors import REASSOCIATED
from regard.mechanism.scores import default_scale
from regard.policies.policy import end_at_prompt


def replay_evictions(inputs, kept, counts, recent, scores, how):
    """Return the end of each key, (b, g, t), as cache_replay.replay_plainly does; key heads run in parallel, a thread each."""
    scale = default_scale(inputs.q) if inputs.scale is None else inputs.scale
    ends = end_at_prompt(kept.clone(), inputs)
    q, k = (x.float().contiguous().numpy() for x in (inputs.q, inputs.k))
    held = scores.float().numpy()
    b, g, _ = kept.shape
    share = inputs.heads_per_key

    def replay(place):
        row, first, stop = place
        keys = kept[row, first].nonzero().flatten().numpy()
        count = int(counts[first])
        slots = np.full(min(count, inputs.tokens) + 1, -1, np.int64)
        slots[: len(keys)] = keys
        sums = np.zeros(len(slots), np.float32)
        sums[: len(keys)] = held[row, first, keys]
        out = ends[row, first].numpy()
        given = q[row, first * share : stop * share], k[row, first:stop], slots, sums, out, len(keys), inputs.prompt
        replay_head(*given, count, int(recent[first]), np.float32(scale), how == "sum")

    units = [(row, n, n + 1) for row in range(b) for n in range(g)] if how == "sum" else [(row, 0, g) for row in range(b)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(replay, units))
    return ends if how == "sum" else ends[:, :1].repeat(1, g, 1)


@njit(fastmath=REASSOCIATED, nogil=True)
def score_slots(q, keys, n, scale, out):
    """Compute the scaled scores of a query (d,) with the first n keys (slots, d); return the largest."""
    largest = np.float32(-np.inf)
    for slot in range(n):
        total = np.float32(0)
        for c in range(len(q)):
            total += q[c] * keys[slot, c]
        out[slot] = total * scale
        largest = max(largest, out[slot])
    return largest


@njit(nogil=True)
def weigh_slots(q, keys, i, n, scale, scores, weights):
    """Compute the weights of query i of all heads (h, t, d) on the first n slots, in the mean over the heads."""
    weights[:n] = 0
    share = len(q) // len(keys)
    for head in range(len(q)):
        largest = score_slots(q[head, i], keys[head // share], n, scale, scores)
        total = 0.0
        for slot in range(n):
            scores[slot] = math.exp(scores[slot] - largest)
            total += scores[slot]
        for slot in range(n):
            weights[slot] += scores[slot] / (total * len(q))


@njit_with_cache()
def replay_head(q, k, slots, sums, ends, filled, prompt, count, recent, scale, is_summed):
    """Replay the cache of some key heads (g, t, d) that keep the same keys, with the queries of all their heads (h, t, d)."""
    keys = np.zeros((len(k), len(slots), k.shape[2]), np.float32)
    for slot in range(filled):
        for group in range(len(k)):
            keys[group, slot] = k[group, slots[slot]]
    scores, weights = np.zeros(len(slots), np.float32), np.zeros(len(slots), np.float32)
    free = filled
    for i in range(prompt, q.shape[1]):
        slots[free], sums[free] = i, 0
        for group in range(len(k)):
            keys[group, free] = k[group, i]
        n = min(filled + 1, len(slots))
        weigh_slots(q, keys, i, n, scale, scores, weights)
        for slot in range(n):
            sums[slot] = sums[slot] + weights[slot] if is_summed else weights[slot]
        if filled < count:
            filled += 1
            free = filled
            continue
        victim = -1
        for slot in range(n):
            if slots[slot] <= i - recent and (victim < 0 or sums[slot] < sums[victim]):
                victim = slot
        ends[slots[victim]] = i + 1
        free = victim
