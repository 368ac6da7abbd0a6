"""The formula that a kernel is compared with, in any dtype, and the shapes in which kernels break."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from regard.examination import mask_requirements
from regard.mechanism import EVERYTHING, Mask
from regard.mechanism.heads import share

FLOOR = 32  # times eps of the largest number: kernels sum in another order, and have exponentials of their own
AS_PLAIN = 2  # times the error of the plain formula in the kernel's dtype: the bound of FlashAttention's own tests
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)  # around blocks of 16, 64 and 128
WIDTHS = (8, 20, 33, 80, 96)
GROUPS = ((4, 2), (6, 2), (4, 1))  # heads of queries and of keys
UNEQUAL = ((17, 40), (1, 65), (40, 17))  # queries and keys; the last has rows that see nothing if the last ones meet
LARGE, LARGE_HALF = 30.0, 8.0  # the size of inputs whose scores overflow an exponential
Offset = int | Literal["last"] | None


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


@dataclass(frozen=True)
class KernelShape:
    """The sizes of q (b, heads, queries, width) and of k and v (b, groups, keys, width), and the size of their numbers."""

    batch: int = 2
    heads: int = 2
    groups: int = 2
    queries: int = 17
    keys: int = 17
    width: int = 16
    size: float = 1.0

    def __str__(self) -> str:
        q = (self.batch, self.heads, self.queries, self.width)
        k = (self.batch, self.groups, self.keys, self.width)
        times = f", numbers times {self.size:g}" if self.size != 1 else ""
        return (f"q, k and v {q}" if q == k else f"q {q}, k and v {k}") + times


@dataclass(frozen=True, eq=False)
class KernelTask:
    """What a kernel is asked for: who sees whom, the scale, the position of the first query, the dtype and the device."""

    expects: Mask
    scale: float | None
    offset: Offset
    dtype: torch.dtype
    device: torch.device

    def get_offset(self, shape: KernelShape) -> int:
        """Return the position of the first query among the keys."""
        return shape.keys - shape.queries if self.offset == "last" else self.offset or 0

    def make_formula(self, shape: KernelShape, seed: int = 0) -> AttentionFormula:
        """Return the formula of seeded normal inputs in the kernel's dtype."""
        draw = torch.Generator().manual_seed(seed)

        def make_input(heads: int, tokens: int) -> Tensor:
            x = torch.randn(shape.batch, heads, tokens, shape.width, generator=draw, dtype=torch.float64) * shape.size
            return x.to(self.device, self.dtype)

        q, k, v = (make_input(*sizes) for sizes in ((shape.heads, shape.queries), *[(shape.groups, shape.keys)] * 2))
        seen = self.make_table(shape, self.get_offset(shape))
        return AttentionFormula(q, k, v, seen, shape.width**-0.5 if self.scale is None else self.scale)

    def make_table(self, shape: KernelShape, offset: int) -> Tensor:
        """Return who sees whom, bool (b, h, q, k)."""
        table = self.expects.table(shape.queries, shape.keys, offset).to(self.device)
        return table[(None,) * (4 - table.dim())].expand(shape.batch, shape.heads, -1, -1)

    def list_shapes(self) -> Iterator[KernelShape]:
        """Yield the shapes to try, small ones first; lengths and batches only if the mask allows others than its own."""
        usual = KernelShape(batch=mask_requirements.choose_batch_size(self.expects))
        count = self.expects.key_count
        if count is not None:
            usual = replace(usual, queries=count, keys=count)
        yield usual
        yield from (replace(usual, heads=heads, groups=groups) for heads, groups in GROUPS)
        yield from (replace(usual, width=width) for width in WIDTHS)
        if count is None:
            yield from (replace(usual, queries=t, keys=t) for t in LENGTHS)
            if self.offset is not None or self.expects == EVERYTHING:
                yield from (replace(usual, queries=q, keys=k) for q, k in UNEQUAL)
        yield replace(usual, size=LARGE if torch.finfo(self.dtype).bits >= 32 else LARGE_HALF)
