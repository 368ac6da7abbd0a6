"""How well a query matches a key: the dot product, the scaled dot product, and Bahdanau's additive score."""

import math

import torch
from torch import Tensor


def dot(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ. Shapes: q (..., q, d); k (..., k, d); the scores (..., q, k)."""
    return q @ k.mT


def scaled_dot(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q kᵀ / √d, or times `scale` where one is given.

    Shapes: q (..., q, d); k (..., k, d); the scores (..., q, k).
    Source: Vaswani et al. 2017, section 3.2.1.
    """
    return dot(q, k) * default_scale(q) if scale is None else dot(q, k) * scale


def additive(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """weightᵀ tanh(q + k), of queries and keys that are already projected to one width n.

    Shapes: q (..., q, n); k (..., k, n); weight (n,); the scores (..., q, k).
    Source: Bahdanau et al. 2014, appendix A.1.2.
    """
    return (q.unsqueeze(-2) + k.unsqueeze(-3)).tanh() @ weight  # (..., q, k, n) -> (..., q, k)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores of this dtype are computed: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def default_scale(q: Tensor) -> float:
    """1 / √d: keeps the variance of a score near 1 when those of q and k are."""
    return 1 / math.sqrt(q.shape[-1])
