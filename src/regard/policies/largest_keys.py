"""The keys with the largest weights of each query after the prompt, by the map, which is the definition, or a faster pass."""

import numpy as np
import torch
from torch import Tensor

from regard.compiled import processor
from regard.compiled.threads import run_parts
from regard.map.pass_inputs import pack_panels
from regard.mechanism.scores import default_scale, score_dtype
from regard.policies.attention_inputs import AttentionInputs

ROWS = 64  # queries that a thread takes at a time


def find_largest_keys(inputs: AttentionInputs, head: int, count: int) -> Tensor:
    """Return the `count` keys with the largest weights of each query after the prompt in one head, int32 (b, 1, n, count).

    They are in no order. Where a query sees fewer, keys that it does not see, or one that it sees again, fill the row.
    """
    q, k = inputs.q[:, head], inputs.k[:, head // inputs.heads_per_key]
    is_plain = inputs.bias is None and q.device.type == "cpu" and score_dtype(q.dtype) == torch.float32
    if not (is_plain and processor.has_numba() and q.shape[2] and q.isfinite().all() and k.isfinite().all()):
        return inputs.build_map(inputs.prompt).select(heads=[head]).top(count)[1].int()
    scale = default_scale(q) if inputs.scale is None else inputs.scale
    rows = [run_compiled(inputs, x.float() * scale, y.float(), count) for x, y in zip(q, k, strict=True)]
    return torch.stack(rows).unsqueeze(1)


def run_compiled(inputs: AttentionInputs, q: Tensor, k: Tensor, count: int) -> Tensor:
    """Return the keys (n, count) of one matrix, of queries q (t, d), scaled, and keys k (t, d), by the compiled pass."""
    from regard.policies import numba_largest_keys

    t, prompt, threads = inputs.tokens, inputs.prompt, torch.get_num_threads()
    lows, stops = inputs.find_key_ranges()
    queries, panels, found = q.contiguous().numpy(), pack_panels(k.T.numpy()), np.empty((t - prompt, count), np.int32)

    def work(n: int) -> None:
        for first in range(prompt + n * ROWS, t, threads * ROWS):
            bounds = lows, stops, prompt, first, min(first + ROWS, t)
            numba_largest_keys.find_largest_keys(queries, panels, *bounds, found)

    run_parts(work, threads)
    return torch.from_numpy(found)
