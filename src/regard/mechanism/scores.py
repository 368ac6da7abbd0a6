"""Scores of queries against keys: dot product, scaled dot product, and Bahdanau's additive score."""

import math

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import check_number, check_tensor_axes


def dot(q: Tensor, k: Tensor) -> Tensor:
    """Compute q kᵀ. Shapes: q (..., q, d); k (..., k, d); the scores (..., q, k)."""
    check_query_and_key(q, k)
    return q @ k.mT


def scaled_dot(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Compute q kᵀ / √d, or q kᵀ times `scale`.

    Shapes: q (..., q, d); k (..., k, d); the scores (..., q, k).
    Source: Vaswani et al. 2017, section 3.2.1.
    """
    return dot(q, k) * (default_scale(q) if scale is None else check_number("scale", scale, " or None for 1 / √d"))


def additive(q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
    """Compute weightᵀ tanh(q + k) of queries and keys that are already projected to one width n.

    Shapes: q (..., q, n); k (..., k, n); weight (n,); the scores (..., q, k).
    Source: Bahdanau et al. 2014, appendix A.1.2.
    """
    check_query_and_key(q, k)
    if check_tensor_axes("weight", weight, 1).shape != q.shape[-1:] or weight.dtype != q.dtype:
        came = f"{weight.dtype} {tuple(weight.shape)}"
        raise ShapeError(f"weight must be (n,) = ({q.shape[-1]},) of {q.dtype}, one for each feature of a query; got {came}.")
    return (q.unsqueeze(-2) + k.unsqueeze(-3)).tanh() @ weight  # (..., q, k, n) -> (..., q, k)


def check_query_and_key(q: Tensor, k: Tensor) -> None:
    """Raise an error unless q (..., q, d) and k (..., k, d) are floating tensors of one dtype whose axes agree."""
    check_tensor_axes("q", q, 2)
    check_tensor_axes("k", k, 2)
    if q.dtype != k.dtype or q.device != k.device:
        raise ConfigError(f"q and k must have one dtype and device, got {q.dtype} {q.device} and {k.dtype} {k.device}.")
    alike = zip(q.shape[-3::-1], k.shape[-3::-1], strict=False)
    if q.shape[-1] != k.shape[-1] or any(a != b and 1 not in (a, b) for a, b in alike):
        raise ShapeError(f"q must be (..., q, d) and k (..., k, d) with the same d; got {tuple(q.shape)} and {tuple(k.shape)}.")


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scores of inputs of this dtype are computed: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def default_scale(q: Tensor) -> float:
    """Return 1 / √d, which keeps the variance of a score near 1 if q and k have variance 1."""
    return 1 / math.sqrt(q.shape[-1])
