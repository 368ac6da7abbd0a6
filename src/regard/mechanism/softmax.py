"""From scores to weights over the last axis, in four forms: by sum, naive, stable, and online in blocks."""

import torch
from torch import Tensor

from regard.mechanism.arguments import check_count, check_tensor_axes
from regard.mechanism.scores import score_dtype


def by_sum(scores: Tensor) -> Tensor:
    """Compute s / Σ s. A probability only if no score is negative; fails where the scores sum to 0."""
    check_tensor_axes("scores", scores, 1)
    return scores / scores.sum(-1, keepdim=True)


def naive(scores: Tensor) -> Tensor:
    """Compute exp(s) / Σ exp(s). In float32 this is NaN from a score of 89 on, and 0 / 0 if all lie below -104."""
    exponentials = check_tensor_axes("scores", scores, 1).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def stable(scores: Tensor) -> Tensor:
    """Compute exp(s - max s) / Σ exp(s - max s), which equals the naive form, with no exponent above 0.

    A row of only -inf, a query that may see nothing, has weights 0.
    """
    blind = (check_tensor_axes("scores", scores, 1) == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)  # torch's softmax subtracts the maximum


def blockwise(scores: Tensor, block: int = 256) -> Tensor:
    """Compute the stable softmax, its maximum and sum accumulated in one pass over blocks of scores.

    A block with a larger score rescales the sum so far: Σ ← Σ exp(max_old - max_new) + Σ_block.
    Source: Milakov and Gimelshein 2018, algorithm 3.
    """
    block = check_count("block", block)
    # a long sum stops growing in bfloat16
    dtype, scores = check_tensor_axes("scores", scores, 1).dtype, scores.to(score_dtype(scores.dtype))
    top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(top)
    for part in scores.split(block, dim=-1):
        if not part.shape[-1]:
            break  # no scores at all
        new_top = torch.maximum(top, part.amax(-1, keepdim=True))
        shift = new_top.masked_fill(new_top == -torch.inf, 0)  # nothing seen yet: -inf - -inf would be NaN
        total = total * (top - shift).exp() + (part - shift).exp().sum(-1, keepdim=True)
        top = new_top
    blind = top == -torch.inf
    return ((scores - top.masked_fill(blind, 0)).exp() / total.masked_fill(blind, 1)).to(dtype)
