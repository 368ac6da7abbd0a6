"""Attention written out as loops over float64 numbers, sharing no line with the library it is held against."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Sees = Callable[[int, int, int, int], bool]


def everyone(b: int, h: int, i: int, j: int) -> bool:
    return True


def row_of_weights(scores: list[float], sink: float | None) -> list[float]:
    """The softmax of one row; a row of -inf alone has weights 0."""
    top = max([*scores, -math.inf if sink is None else sink])
    if top == -math.inf:
        return [0.0] * len(scores)
    exponentials = [math.exp(score - top) for score in scores]
    total = sum(exponentials) + (0.0 if sink is None else math.exp(sink - top))
    return [exponential / total for exponential in exponentials]


def score(q, k, scale: float, softcap: float | None, bias: float) -> float:
    raw = sum(float(x) * float(y) for x, y in zip(q, k, strict=True)) * scale
    if softcap is not None:
        raw = softcap * math.tanh(raw / softcap)
    return raw + bias


def attention(q, k, v, sees: Sees = everyone, *, scale=None, softcap=None, bias=None, sinks=None) -> tuple[NDArray, NDArray]:
    """Weights (b, h, q, k) and context (b, h, q, e) of q (b, h, q, d), k (b, g, k, d), v (b, g, k, e) as numpy arrays."""
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    bias = np.zeros((1, 1, 1, 1)) if bias is None else bias
    bias = np.broadcast_to(bias, (batch, heads, queries, keys))
    weights = np.zeros((batch, heads, queries, keys))
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // k.shape[1])
            for i in range(queries):
                scores = [
                    score(q[b, h, i], k[b, g, j], scale, softcap, float(bias[b, h, i, j])) if sees(b, h, i, j) else -math.inf
                    for j in range(keys)
                ]
                weights[b, h, i] = row_of_weights(scores, None if sinks is None else float(sinks[h]))
    shared = np.repeat(v, heads // v.shape[1], axis=1)
    return weights, np.einsum("bhqk,bhke->bhqe", weights, shared)
