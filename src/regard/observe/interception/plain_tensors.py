"""Plain tensors of tensor subclasses, which of these have numbers, and a context without torch modes and transforms."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.mechanism.arguments import add_article
from regard.observe.interception.tensor_arguments import PLAIN

UNFOLLOWED = "its weights are multiplied with the values in a way that is not followed: name them with regard.attends"

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


class UnreadableError(Exception):
    """A call cannot be read; the text says why."""


def unwrap_tensor(x: Any) -> Any:
    """Return a tensor without its subclass. Raises UnreadableError if it has no numbers of its own."""
    if not isinstance(x, Tensor):
        raise UnreadableError(f"one of its arguments is {add_article(type(x).__name__)}, not a tensor")
    if torch._C._functorch.is_batchedtensor(x):
        raise UnreadableError("it runs inside torch.vmap, where one tensor represents many")
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        if not has_own_data(x):
            raise UnreadableError(f"its tensors are of type {type(x).__name__}, which has no data of its own")
        return unwrap_tensor(x.as_subclass(Tensor))
    if x.is_nested or x.is_meta:
        raise UnreadableError(f"its tensors are {'nested' if x.is_nested else 'on the meta device, without data'}")
    return x


def disable_modes() -> AbstractContextManager[object]:
    """Return a context in which no torch mode and no functorch transform sees what is computed."""
    others = torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack()
    return disable_all_modes() if others else torch._C.DisableTorchFunction()


@contextmanager
def disable_all_modes() -> Iterator[None]:
    """Disable torch function modes, torch dispatch modes and functorch transforms while the context is active."""
    with ExitStack() as stack:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        yield


def has_own_data(x: Tensor) -> bool:
    """Return whether a tensor has numbers of its own, not those that a subclass's `__torch_dispatch__` provides."""
    return type(x) in PLAIN or type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_comparable(x: Tensor) -> bool:
    """Return whether a condition may be computed of a tensor's numbers: not inside torch.vmap, nor of one without its own."""
    is_plain = has_own_data(x) and not (x.is_nested or x.is_meta) and x.layout is torch.strided
    return is_plain and not torch._C._functorch.is_batchedtensor(x)


def sum_bits(x: Tensor) -> Tensor:
    """Return a number for each vector (..., d), equal for vectors with equal bits."""
    bits = x.contiguous().view(INTEGERS[x.element_size()]).long()
    factors = torch.arange(1, x.shape[-1] + 1, device=x.device) * 0x5851F42D4C957F2D | 1
    return (bits * factors).sum(-1)


def is_distributed(x: Any) -> bool:
    """Return whether a value is a DTensor, whose class is not imported here."""
    return type(x).__name__ == "DTensor"


def is_readable(x: Tensor) -> bool:
    """Return whether a tensor has numbers on this rank: all of its own, or those of its part if it is a DTensor."""
    return has_own_data(x) or is_distributed(x)
