"""Whether work of ours may take the place of torch's: of plain tensors, while nobody waits for torch's own operations."""

import torch
from torch import Tensor

KINDS = {torch.float32: "float32", torch.bfloat16: "uint16"}  # what loops read in memory, and how numba knows it


def unwatched() -> bool:
    """Whether nobody waits for torch's own operations: compilers, transforms, modes of dispatch and tracing."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state()
    )


def plain(x: Tensor) -> bool:
    """Whether x is numbers in memory, and nothing else."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and not x.is_neg()
