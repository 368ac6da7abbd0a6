"""Fused CPU operations of training: cross entropy and GELU, each in one pass over the data.

torch's own functions are the definition, and are used for everything else: other devices, other dtypes, compilers.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.compiled import threads
from regard.compiled.dispatch_guard import NUMBA_DTYPES, can_bypass_dispatch, is_plain_tensor
from regard.models.gpt2 import ACTIVATIONS, GPT2, Block
from regard.text.corpus.reader import NO_TARGET

LEAST_ELEMENTS = 2**16  # least number of elements for which the compiled loops are used


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Compute -Σ log softmax(logits)[target] over the rows whose target is not NONE, in nats; logits (m, n), targets (m,).

    With label smoothing s, a row's target distribution is 1 - s at the target plus s spread evenly over all words (Szegedy et
    al. 2016, section 7).
    """
    if can_use_loops(logits):
        total: Tensor = FusedCrossEntropy.apply(logits.contiguous(), targets, smoothing)  # type: ignore[no-untyped-call]
        return total
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(wide, targets, ignore_index=NO_TARGET, reduction="sum", label_smoothing=smoothing)


def gelu(x: Tensor) -> Tensor:
    """Compute x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, GPT-2's activation."""
    if can_use_loops(x):
        output: Tensor = FusedGelu.apply(x.contiguous())  # type: ignore[no-untyped-call]
        return output
    return ACTIVATIONS["gelu_tanh"](x)


def use_fused_gelu(model: GPT2) -> GPT2:
    """Replace torch's GELU in the blocks of a model by the fused one, and return the model."""
    for block in cast(Iterable[Block], model.blocks):
        if block.activation is ACTIVATIONS["gelu_tanh"]:
            block.activation = gelu
    return model


def can_use_loops(x: Tensor) -> bool:
    """Return whether the fused loops can be used for a tensor."""
    return (
        can_bypass_dispatch()
        and is_plain_tensor(x)
        and x.dtype in NUMBA_DTYPES
        and x.numel() >= LEAST_ELEMENTS
        and import_loops() is not None
    )


@cache
def import_loops() -> Any:
    """Return the module of compiled loops; None if numba is not installed or torch's threads cannot be used."""
    if not threads.can_run_loops():
        return None
    from regard.train import fused_loops

    return fused_loops


class FusedCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropies of rows of logits; no tensor of the logits' size is saved besides the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the sum as a scalar."""
        rows, n = logits.shape
        lse = logits.new_empty(rows, dtype=torch.float32)
        launch_loop("make_logsumexp_callback", logits.dtype, rows=rows, columns=n, x=logits, lse=lse)
        real = targets != NO_TARGET
        ctx.save_for_backward(logits, lse, targets, real)
        ctx.smoothing = smoothing
        target_logits = logits.gather(1, targets.clamp(min=0)[:, None])[:, 0].float()
        if smoothing:
            target_logits = (1 - smoothing) * target_logits + smoothing * logits.mean(1, dtype=torch.float32)
        return torch.where(real, lse - target_logits, 0).sum(dtype=torch.float64).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient, softmax - 1 at the target, (m, n); with smoothing, the target's share is spread evenly."""
        logits, lse, targets, real = ctx.saved_tensors
        out, factors = torch.empty_like(logits), real * grad.float()
        rows, n = logits.shape
        arrays = {"x": logits, "lse": lse, "targets": targets.contiguous(), "factors": factors, "out": out}
        launch_loop("make_entropy_gradient_callback", logits.dtype, rows=rows, columns=n, **arrays)
        if ctx.smoothing:
            share = (factors * ctx.smoothing).to(out.dtype)[:, None]
            out.sub_(share / out.shape[1]).scatter_add_(1, targets.clamp(min=0)[:, None], share)
        return out, None, None


class FusedGelu(torch.autograd.Function):
    """GELU in its tanh form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the activations, of the shape of x."""
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        launch_loop("make_gelu_callback", x.dtype, columns=x.numel(), x=x, out=out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient times the derivative of GELU."""
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        launch_loop("make_gelu_gradient_callback", x.dtype, columns=x.numel(), x=x, grad=grad.to(x.dtype).contiguous(), out=out)
        return out


def launch_loop(name: str, dtype: torch.dtype, **arguments: Tensor | int) -> None:
    """Run a compiled loop on torch's threads, with the named fields of its arguments."""
    threads.run_callback(getattr(import_loops(), name)(NUMBA_DTYPES[dtype]), torch.get_num_threads(), **arguments)
