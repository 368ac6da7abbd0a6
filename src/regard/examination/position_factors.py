"""Tell whether outputs differ from a formula only because each query is multiplied by a factor of its position.

Log n, as in Chiang and Cholak 2022, Overcoming a Theoretical Limitation of Self-Attention, and the temperature of Llama 4.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regard.examination.identify.trial import Trial

FACTORS = torch.logspace(-2, 2, 33, base=2.0, dtype=torch.float64)  # that are tried, of each query
STEPS = 40  # of the search between two of them


def find_position_factors(
    trial: Trial, compute_differences: Callable[[Trial], Tensor], few: int, close: float
) -> Tensor | None:
    """Return a factor on each query, (q,), with which a formula gives all outputs; None unless the first `few` need none."""

    def compute(factors: Tensor) -> Tensor:
        given = replace(trial.given, q=trial.given.q * factors[None, :, None])
        return compute_differences(replace(trial, given=given))

    one = torch.ones(trial.given.q.shape[1], dtype=torch.float64)
    own = compute(one)
    if (own[:few] > close).any():
        return None
    tried = torch.stack([compute(one * factor) for factor in FACTORS])  # (n, q)
    best = tried.argmin(0).clamp(1, len(FACTORS) - 2)
    low, high = FACTORS[best - 1].log(), FACTORS[best + 1].log()
    for _ in range(STEPS):  # golden section
        third = (high - low) * 0.381966
        left, right = (compute(at.exp()) for at in (low + third, high - third))
        low, high = torch.where(left < right, low, low + third), torch.where(left < right, high - third, high)
    factors = torch.where(own > close, ((low + high) / 2).exp(), one)
    return factors if bool((compute(factors) <= close).all()) else None
