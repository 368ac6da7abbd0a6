"""The cross entropy of training, in one pass over the logits on a CPU.

torch's own function is the definition, and is used for everything else: other devices, other dtypes, compilers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.compiled import threads
from regard.compiled.dispatch_guard import NUMBA_DTYPES, can_use_loops
from regard.text.corpus.reader import NO_TARGET


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


def launch_loop(name: str, dtype: torch.dtype, **arguments: Tensor | int) -> None:
    """Run a compiled loop on torch's threads, with the named fields of its arguments."""
    from regard.train import fused_loops  # imports numba, which is installed if this is called

    threads.run_callback(getattr(fused_loops, name)(NUMBA_DTYPES[dtype]), torch.get_num_threads(), **arguments)
