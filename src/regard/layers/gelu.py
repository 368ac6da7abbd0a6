"""GPT-2's activation, GELU in its tanh form: on a CPU in one compiled pass over the numbers, forward and backward.

torch's own function is the definition, and is used for everything else: other devices, other dtypes, compilers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.compiled import threads
from regard.compiled.dispatch_guard import NUMBA_DTYPES, can_use_loops


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    if can_use_loops(x):
        output: Tensor = CompiledGelu.apply(x.contiguous())  # type: ignore[no-untyped-call]
        return output
    return F.gelu(x, approximate="tanh")


class CompiledGelu(torch.autograd.Function):
    """GELU in its tanh form, of a contiguous tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the activations, of the shape of x."""
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        launch_loop("make_gelu_callback", x=x, out=out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient times the derivative of GELU, by torch where that is to be differentiated again."""
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")  # type: ignore[no-any-return]
        out = torch.empty_like(x)
        launch_loop("make_gelu_gradient_callback", x=x, grad=grad.to(x.dtype).contiguous(), out=out)
        return out


def launch_loop(name: str, x: Tensor, **arrays: Tensor) -> None:
    """Run a compiled loop over the numbers of x, and of arrays of its shape, on torch's threads."""
    from regard.layers import numba_gelu  # imports numba, which is installed if this is called

    work = getattr(numba_gelu, name)(NUMBA_DTYPES[x.dtype])
    threads.run_callback(work, torch.get_num_threads(), count=x.numel(), x=x, **arrays)
