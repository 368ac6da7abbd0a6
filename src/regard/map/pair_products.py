"""Dot products of single pairs of a query and a key."""

import torch
from torch import Tensor

from regard.compiled import threads

LEAST = 1024  # pairs; for fewer, torch's own operations are as fast


def multiply_pairs(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the products (n,) of queries (n,) of q (t, d) with keys (n,) of k (s, d), both by index."""
    if not can_use_loop(q, k, queries, keys):
        return (q[queries] * k[keys]).sum(-1)
    from regard.map.compiled.pair_products import multiply_pairs as multiply_compiled

    products, queries, keys = q.new_empty(len(queries)), queries.contiguous(), keys.contiguous()
    threads.run_callback(
        multiply_compiled,
        torch.get_num_threads(),
        count=len(queries),
        width=q.shape[-1],
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        q=q,
        k=k,
        queries=queries,
        keys=keys,
        products=products,
    )
    return products


def can_use_loop(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> bool:
    """Return whether the compiled loop reads these: float32 on a CPU, and pairs of int64 indices that q and k have."""
    for x, index in ((q, queries), (k, keys)):
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1:
            return False
        if index.dtype != torch.int64 or index.dim() != 1 or len(index) < LEAST:
            return False
        low, high = index.aminmax()
        if low < 0 or high >= len(x):
            return False
    return len(queries) == len(keys) and threads.can_run_loops()
