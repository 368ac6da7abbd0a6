"""Find values that are multiplied by the logarithms of weights, as where log_softmax stands in place of softmax."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from regard.examination.call_reading.function_calls import follow_modules
from regard.observe.interception.function_roles import MULTIPLIES

POWERS = ("exp", "exp_", "exp2", "softmax")  # after which numbers are weights again


class LogWeightWatcher(TorchFunctionMode):
    """A torch function mode that follows what log_softmax returns, and keeps the first module that multiplies by it."""

    def __init__(self, running: Sequence[str]) -> None:
        super().__init__()
        self.running, self.found = running, list[str]()
        self.logarithms = dict[int, Tensor]()  # by id, kept so that no id is used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        given = [one for one in tree_leaves((args, kwargs)) if id(one) in self.logarithms]
        if not isinstance(result, Tensor) or not (given or name == "log_softmax"):
            return result
        if name not in MULTIPLIES:
            is_changed = name not in POWERS and any(one.numel() == result.numel() for one in given)
            self.logarithms |= {id(result): result} if is_changed or name == "log_softmax" else {}
        elif result.dim() > 2:  # not that of a loss
            self.found.append(self.running[-1] if self.running else "")
        return result


def find_log_weights(module: nn.Module, run: Callable[[], object]) -> str | None:
    """Return the first module that multiplies by what log_softmax returned, "" for the whole; None if none does."""
    with follow_modules(module) as running:
        watcher: LogWeightWatcher = LogWeightWatcher(running)
        try:
            with watcher, torch.no_grad():
                run()
        except Exception:  # whatever a user's layer raises: another probe reports it
            return None
    return next(iter(watcher.found), None)
