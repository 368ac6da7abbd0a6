"""How far the steps of the lectures' examples, which are computed in float32, may lie from the same in float64."""

from typing import Any

import torch
from torch import Tensor

from bounds import attention_bounds, softmax_bound, sum_bound


def step_bounds(told: dict[str, Any], weights: Tensor) -> dict[str, Tensor]:
    """The bound of each step by name, given what STEPS tell of an example, and its exact weights (q, k)."""
    q, k, v, scores, factors = (
        None if told[name] is None else torch.tensor(told[name], dtype=torch.float64)
        for name in ("q", "k", "v", "scores", "dropout")
    )
    if scores is None:
        tensors = (x[None, None] for x in (q, k, v, weights))
        found = attention_bounds(torch.float32, *tensors, scale=told["scale"])
        scaled, off = found.scores[0, 0], found.weights[0, 0]
    else:  # they are told, to every digit, and only scaled
        scaled = sum_bound(torch.float32, 1) * (scores * told["scale"]).abs()
        off = softmax_bound(torch.float32, scores * told["scale"])
    factors = torch.ones_like(weights) if factors is None else factors  # of dropout: 0 and 2, which round nothing
    context = (off * factors) @ v.abs() + sum_bound(torch.float32, weights.shape[-1]) * (weights * factors) @ v.abs()
    capped = dict.fromkeys(("scaled", "capped", "masked"), scaled)
    return {"scores": scaled / told["scale"], **capped, "weights": off, "dropped": off * factors, "context": context}
