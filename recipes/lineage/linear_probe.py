"""A linear probe: how much of a word can be read from a vector by softmax(W x + b).

Source: Alain and Bengio 2016, Understanding intermediate layers using linear classifier probes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ShapeError

RIDGE = 1e-4  # weight of the squared weights in the loss: keeps them finite if the classes are separable
STEPS = 200  # most steps of L-BFGS


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """A learned probe: weights (n, c) and bias (n,) on standardized vectors, with their mean and deviation, (c,) each."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    deviation: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the likeliest class of each vector (b, c)."""
        return F.linear((x - self.mean) / self.deviation, self.weight, self.bias).argmax(-1)


def fit_probe(x: Tensor, classes: Tensor) -> LinearProbe:
    """Fit the probe of the least mean loss -log softmax(W x + b) on vectors (b, c) and their classes (b,), numbers from 0 on.

    The loss has a single minimum, so the same vectors give the same probe. Raises ShapeError if the two do not fit.
    """
    if x.dim() != 2 or classes.shape != x.shape[:1] or not len(x):
        raise ShapeError(
            f"a probe learns from vectors (b, c) and classes (b,), got {tuple(x.shape)} and {tuple(classes.shape)}."
        )
    mean, deviation = x.mean(0), x.std(0, correction=0).clamp_min(1e-6)
    even, count = (x - mean) / deviation, int(classes.max()) + 1
    weight, bias = x.new_zeros(count, x.shape[1], requires_grad=True), x.new_zeros(count, requires_grad=True)
    search = torch.optim.LBFGS([weight, bias], max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        found = F.cross_entropy(F.linear(even, weight, bias), classes) + RIDGE * weight.square().sum()
        found.backward()
        return found

    with torch.enable_grad():
        search.step(loss)
    return LinearProbe(weight.detach(), bias.detach(), mean, deviation)
