"""Jensen-Shannon divergence of two rows of weights, nats."""

import math

import torch
from torch import Tensor

OPERATIONS = 10  # rounding steps of a weight besides the sum: exponential, division, order


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Return ½ Σ p log(p / m) + ½ Σ q log(q / m), m = (p + q) / 2, over the last axis, nats; between 0 and log 2.

    What a row lacks of 1, because of a sink or because its query sees nothing, counts as one more key.
    Source: Lin 1991.
    """
    return elementwise_divergence(p, q).sum(-1) + elementwise_divergence(missing_weight(p), missing_weight(q))


def missing_weight(p: Tensor) -> Tensor:
    """Return what a row lacks of 1, beyond the rounding error of its sum."""
    lack = 1 - p.sum(-1, dtype=torch.float64)
    return lack.where(lack > sum_error_bound(p.dtype, p.shape[-1]), 0).to(p.dtype)


def sum_error_bound(dtype: torch.dtype, keys: int) -> float:
    """Return γ(n) = min(n, 4 √n) u, n = keys + 10: a bound on |sum - 1| for weights whose total was summed in `dtype`.

    Source: Higham and Mary 2019, theorem 2.4, with λ = 4: to first order in u, half the distance from 1 to the next number.
    """
    terms = keys + OPERATIONS
    return min(terms, 4 * math.sqrt(terms)) * torch.finfo(dtype).eps / 2


def elementwise_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return ½ p log(p / m) + ½ q log(q / m), entry by entry."""
    both = p + q
    tilt = (p - q) / both.where(both > 0, 1)  # p / m = 1 + tilt, whose logarithm keeps small differences
    apart: Tensor = torch.special.xlog1py(1 + tilt, tilt) + torch.special.xlog1py(1 - tilt, -tilt)
    return both / 4 * apart
