"""The formula that a kernel is compared with: scores, weights, log-sum-exp, context and gradients, in any dtype."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regard.mechanism.heads import share

FLOOR = 32  # times eps of the largest number: kernels sum in another order, and have exponentials of their own
AS_PLAIN = 2  # times the error of the plain formula in the kernel's dtype: the bound of FlashAttention's own tests


@dataclass(frozen=True, eq=False)
class AttentionFormula:
    """softmax(q kᵀ scale) v over the keys that `seen` allows.

    q (b, h, q, d), k (b, g, k, d), v (b, g, k, e), seen bool (b, h, q, k). Rows that see
    nothing have weights and context 0, and a log-sum-exp of -inf.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor
    scale: float

    @cached_property
    def raw(self) -> Tensor:
        """The scores q kᵀ, (b, h, q, k), all of them."""
        return self.q @ share(self.k, self.q.shape[1]).mT

    @cached_property
    def scaled(self) -> Tensor:
        """The scores times the scale."""
        return self.raw * self.scale

    @cached_property
    def masked(self) -> Tensor:
        """The scaled scores, -inf where a key is hidden."""
        return self.scaled.masked_fill(~self.seen, -torch.inf)

    @cached_property
    def blind(self) -> Tensor:
        """Which rows see nothing, (b, h, q, 1)."""
        return ~self.seen.any(-1, keepdim=True)

    @cached_property
    def weights(self) -> Tensor:
        """The weights (b, h, q, k)."""
        return self.masked.masked_fill(self.blind, 0).softmax(-1) * self.seen

    @cached_property
    def logsumexp(self) -> Tensor:
        """The logarithm of each row's sum of exponentials, (b, h, q)."""
        return self.masked.logsumexp(-1)

    @cached_property
    def context(self) -> Tensor:
        """The context (b, h, q, e)."""
        return self.weights @ share(self.v, self.q.shape[1])

    def convert(self, dtype: torch.dtype) -> "AttentionFormula":
        """Return the formula in another dtype."""
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def compute_gradients(self, slope: Tensor) -> dict[str, Tensor]:
        """Return the gradients of q, k and v for the gradient of the context, (b, h, q, e)."""
        inputs = [x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v)]
        with torch.enable_grad():
            q, k, v = inputs
            context = AttentionFormula(q, k, v, self.seen, self.scale).context
        found = torch.autograd.grad(context, inputs, slope.to(context.dtype))
        return dict(zip(("q", "k", "v"), found, strict=True))


def get_allowed_error(exact: Tensor, plain: Tensor, largest: float = 0.0) -> float:
    """Return how far a kernel's result may be from the exact one: AS_PLAIN times what the plain formula is off, and a FLOOR.

    `exact` is in float64, `plain` the same by the plain formula in the kernel's dtype, `largest` a number that cancels in it.
    Source: FlashAttention, tests/test_flash_attn.py, which allows twice the error of PyTorch's formula in the same dtype.
    """
    known = exact.isfinite()
    size = max(float(exact[known].abs().max()) if known.any() else 0.0, largest)
    eps = torch.finfo(plain.dtype).eps
    floor = (FLOOR if eps < 1e-4 else 2) * eps * size
    return AS_PLAIN * measure_error(plain, exact) + floor


def measure_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference where the exact result is finite; infinite for NaN."""
    known = exact.isfinite()
    difference = (found.detach().cpu().double() - exact.cpu()).abs()[known.cpu()]
    return float(difference.nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0
