"""Run a float64 copy with the constants that its code takes from a coarser dtype, such as the eps of a norm."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class RMSNormEps(TorchFunctionMode):
    """A torch function mode in which rms_norm without eps takes that of a dtype."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") == "rms_norm" and len(args) < 4 and given.get("eps") is None:
            given["eps"] = self.eps
        return func(*args, **given)


@contextmanager
def use_constants_of(dtype: torch.dtype) -> Iterator[None]:
    """Let torch.finfo(torch.float64), and norms without an eps, take the numbers of another dtype in the context."""
    plain = torch.finfo

    def find_limits(asked: torch.dtype | None = None) -> torch.finfo:
        return plain(dtype if asked in (None, torch.float64) else asked)

    with mock.patch.object(torch, "finfo", find_limits), RMSNormEps(plain(dtype).eps):
        yield


def keep_eps(module: nn.Module, dtype: torch.dtype) -> None:
    """Set the eps of norms that take it from their dtype to that of `dtype`."""
    for part in module.modules():
        if "eps" in vars(part) and part.eps is None:
            part.eps = torch.finfo(dtype).eps
