"""Detect hard routing in a forward: a top-k, an argmax or a sort, whose choices have no gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROUTERS = ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "msort", "multinomial")


class RoutingRecorder(TorchFunctionMode):
    """A torch function mode that keeps the names of routing functions that run, and the indices that they choose."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.choices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", ""))
        if name in ROUTERS and args and isinstance(args[0], Tensor) and args[0].is_floating_point():  # not of a table of a mask
            self.names.append(name)
            parts = result if isinstance(result, tuple) else (result,)
            self.choices += [one.clone() for one in parts if isinstance(one, Tensor) and not one.is_floating_point()]
        return result


def record_routing(run: Callable[[], object]) -> RoutingRecorder:
    """Return what routing functions chose while `run` ran."""
    recorder = RoutingRecorder()
    with recorder, torch.no_grad():
        run()
    return recorder


def has_equal_choices(one: RoutingRecorder, other: RoutingRecorder) -> bool:
    """Return whether two forwards made the same choices."""
    return len(one.choices) == len(other.choices) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(one.choices, other.choices, strict=True)
    )
