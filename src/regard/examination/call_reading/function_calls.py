"""Record the calls of torch functions in a run, each with the part of a module in which it ran."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MOST = 2**22  # numbers of a result that is kept


class FunctionCall(NamedTuple):
    """A call of a function: its name, the part in which it ran, "" for the whole, its first tensor and its result."""

    name: str
    module: str
    given: Tensor
    made: Tensor


class FunctionRecorder(TorchFunctionMode):
    """A torch function mode that keeps the calls of functions of some names, with underscores around them or without."""

    def __init__(self, names: Collection[str], running: Sequence[str]) -> None:
        super().__init__()
        self.names, self.running, self.calls = names, running, list[FunctionCall]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        is_named = name in self.names or name.strip("_") in self.names
        if is_named and isinstance(result, Tensor) and result.numel() <= MOST:
            given = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)), result)
            where = self.running[-1] if self.running else ""
            self.calls.append(FunctionCall(name.strip("_"), where, given.detach().clone(), result.detach().clone()))
        return result


def record_functions(names: Collection[str], run: Callable[[], object], module: nn.Module | None = None) -> list[FunctionCall]:
    """Return the calls of functions of these names in a run of a module, or of no module."""
    with follow_modules(module) as running:
        recorder: FunctionRecorder = FunctionRecorder(names, running)
        with recorder, torch.no_grad():
            run()
    return recorder.calls


@contextmanager
def follow_modules(module: nn.Module | None) -> Iterator[list[str]]:
    """Keep the names of the running parts of a module in a list, the innermost last."""
    running: list[str] = []
    hooks = []
    for name, part in module.named_modules() if module is not None else ():
        if name:
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            hooks.append(part.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    try:
        yield running
    finally:
        for one in hooks:
            one.remove()
