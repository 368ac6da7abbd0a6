# mypy: ignore-errors
"""The cache of `eviction.py` compiled by numba, for causal attention in float32 on a CPU without sinks and softcap."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from regard.compiled.inlined import njit_inlined
from regard.compiled.jit_cache import njit_with_cache
from regard.compiled.register_tiles import COLUMNS, ROWS, find_maximum, multiply_tile
from regard.compiled.vectors import LEAST, add_scaled_row, exponentiate_with_sums
from regard.mechanism.scores import default_scale
from regard.policies.policy import end_at_prompt


def replay_evictions(inputs, kept, counts, recent, scores, how):
    """Return the end of each key, (b, g, t), as eviction.replay_plainly does; key heads run in parallel, a thread each."""
    scale = default_scale(inputs.q) if inputs.scale is None else inputs.scale
    ends = end_at_prompt(kept.clone(), inputs)
    q, k = (x.contiguous().numpy() for x in (inputs.q.float() * scale, inputs.k.float()))
    rows_of_scores = scores.float().numpy()
    b, g, _ = kept.shape
    share = inputs.heads_per_key

    def replay(place):
        row, first, stop = place
        keys = kept[row, first].nonzero().flatten().numpy()
        count = int(counts[first])
        slots = np.full(min(count, inputs.tokens) + 1, -1, np.int64)
        slots[: len(keys)] = keys
        sums = np.zeros(len(slots), np.float32)
        sums[: len(keys)] = rows_of_scores[row, first, keys]
        out = ends[row, first].numpy()
        arguments = q[row, first * share : stop * share], k[row, first:stop], slots, sums, out, len(keys), inputs.prompt
        replay_head(*arguments, count, int(recent[first]), how == "sum")

    units = [(row, n, n + 1) for row in range(b) for n in range(g)] if how == "sum" else [(row, 0, g) for row in range(b)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(replay, units))
    return ends if how == "sum" else ends[:, :1].repeat(1, g, 1)


@njit_inlined()
def weigh_slots(q, panels, i, n, some, e, weights):
    """Compute the weights of query i of all heads (h, t, d), scaled, on the first n slots, in the mean over the heads."""
    weights[:n] = 0
    groups, width, depth, _ = panels.shape
    share, full, stride = len(q) // groups, -(-n // COLUMNS) * COLUMNS, e.shape[1]
    for head in range(len(q)):
        place = head % share % ROWS  # in the tile
        some[place] = q[head, i]
        if place < ROWS - 1 and head % share < share - 1:
            continue
        for j in range(0, full, COLUMNS):
            start = (head // share * width * COLUMNS + j) * depth
            multiply_tile(some, 0, depth, 1, panels, start, depth, e, j, stride)
        for r in range(place + 1):
            e[r, n:full] = LEAST
            total = exponentiate_with_sums(e[r, :full], find_maximum(e, r * stride, full))[0]
            add_scaled_row(e[r, :n], np.float32(1 / (total * len(q))), weights[:n])


@njit_inlined()
def store_key(k, i, panels, slot):
    """Store key i of some key heads (g, t, d) in a slot of the panels (g, panels, d, COLUMNS)."""
    for group in range(len(k)):
        for c in range(k.shape[2]):
            panels[group, slot // COLUMNS, c, slot % COLUMNS] = k[group, i, c]


@njit_with_cache()
def replay_head(q, k, slots, sums, ends, filled, prompt, count, recent, is_summed):
    """Replay the cache of some key heads (g, t, d) that keep the same keys, with the queries of all their heads (h, t, d)."""
    width = -(-len(slots) // COLUMNS)
    panels = np.zeros((len(k), width, k.shape[2], COLUMNS), np.float32)
    for slot in range(filled):
        store_key(k, slots[slot], panels, slot)
    some, e = np.zeros((ROWS, k.shape[2]), np.float32), np.zeros((ROWS, (width + 1) * COLUMNS), np.float32)
    weights = np.zeros(len(slots), np.float32)
    free = filled
    for i in range(prompt, q.shape[1]):
        slots[free], sums[free] = i, 0
        store_key(k, i, panels, free)
        n = min(filled + 1, len(slots))
        weigh_slots(q, panels, i, n, some, e, weights)
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
