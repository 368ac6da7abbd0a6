"""Additive scores, weightᵀ tanh(q + k), in blocks, so that the q x k x d numbers within the tanh never exist at once."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism import additive
from regard.mechanism.arguments import check_floating
from regard.mechanism.request import disable_autocast

BLOCK_TANHS = 2**18  # numbers within the tanh at a time, few enough for the processor's cache
SINGLE_THREAD_LIMIT = 2**22  # numbers within the tanh up to which one thread is used


def scores(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """Compute weightᵀ tanh(q + k), (n, m), for q (n, d), k (m, d) and weight (d,)."""
    found = q.new_empty(len(q), len(k))
    if additive.can_use_loops(q[None, None], k[None, None], weight):
        compute_compiled_scores(q, k, weight, found)
        return found
    columns = max(1, min(len(k), BLOCK_TANHS // len(weight)))
    rows = max(1, BLOCK_TANHS // (columns * len(weight)))
    for i in range(0, len(q), rows):
        for j in range(0, len(k), columns):
            found[i : i + rows, j : j + columns] = score_pairs(q[i : i + rows].unsqueeze(1), k[j : j + columns], weight)
    return found


def score_pairs(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """Compute weightᵀ tanh(q + k) of queries and keys (..., d) that broadcast, pair by pair, to (...)."""
    with disable_autocast(q.device):  # torch.autocast would round the product
        return (q + k).tanh_() @ weight


def compute_compiled_scores(q: Tensor, k: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute weightᵀ tanh(q + k) into `out` by the compiled loops of `mechanism.additive`, the queries split over threads."""
    keys, weight = k.contiguous()[None, None], weight.contiguous()
    threads = torch.get_num_threads() if len(q) * len(k) * len(weight) > SINGLE_THREAD_LIMIT else 1

    def work(parts: tuple[Tensor, Tensor]) -> None:
        additive.launch_loops("compute_scores", parts[0].contiguous()[None, None], keys, weight=weight, scores=parts[1])

    parts = list(zip(q.tensor_split(threads), out.tensor_split(threads), strict=True))
    if threads == 1:
        return work(parts[0])
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, parts))
    return None


def check_weight(weight: Tensor, q: Tensor) -> Tensor:
    """Return the weight of additive scores, or raise ShapeError or ConfigError."""
    if check_floating("weight", weight).device != q.device:
        raise ConfigError(f"weight must be on q's device, {q.device}; got {weight.device}. Use .to(device).")
    if weight.shape != q.shape[-1:]:
        shapes = f"expected {tuple(q.shape[-1:])}, got {tuple(weight.shape)}"
        raise ShapeError(f"weight must be (d,), one for each feature of a query: {shapes}.")
    return weight
