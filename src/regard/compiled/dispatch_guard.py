"""Whether compiled code may replace torch's operations: for plain tensors, while nothing intercepts torch's dispatch."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.compiled import threads

LEAST_ELEMENTS = 2**16  # least number of elements for which loops over single numbers are used
NUMBA_DTYPES = {torch.float32: "float32", torch.bfloat16: "uint16"}  # dtypes the loops read, by the names that numba uses


def can_bypass_dispatch() -> bool:
    """Return whether no compiler, functorch transform, dispatch mode, forward-mode AD or tracer needs torch's operations."""
    return not (
        torch.compiler.is_compiling()
        or computes_tangents()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state()
    )


def computes_tangents() -> bool:
    """Return whether forward-mode AD is active, as in torch.func.jvp: no fused kernel has a forward derivative."""
    return forward_ad._current_level >= 0


def is_plain_tensor(x: Tensor) -> bool:
    """Return whether x is an ordinary CPU tensor or parameter, without a pending negation."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and not x.is_neg()


def can_use_loops(x: Tensor) -> bool:
    """Return whether compiled loops over single numbers can be used for a tensor."""
    fits = can_bypass_dispatch() and is_plain_tensor(x) and x.dtype in NUMBA_DTYPES and x.numel() >= LEAST_ELEMENTS
    return fits and threads.can_run_loops()
