"""Record projections that are computed by F.linear with the weight of a module that is not called, as torchvision's windows."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def watch_projections(module: nn.Module, keep: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `keep` in the block with the name of a linear part and what F.linear computes by its weight without calling it."""
    linear = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    mode = LinearFunctionMode({id(part.weight): name for name, part in linear.items()}, keep)
    hooks = [part.register_forward_pre_hook(mode.forget_weight) for part in linear.values()]
    try:
        with mode:
            yield
    finally:
        for one in hooks:
            one.remove()


class LinearFunctionMode(TorchFunctionMode):
    """Hands on each output of F.linear by one of some weights, by their ids."""

    def __init__(self, names: dict[int, str], keep: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.names, self.keep = names, keep

    def forget_weight(self, part: nn.Linear, _: object) -> None:
        """Ignore the weight of a part that is called, whose output a hook sees."""
        self.names.pop(id(part.weight), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and hand on its output."""
        output = func(*args, **(kwargs or {}))
        name = self.names.get(id(args[1])) if func is F.linear and len(args) > 1 else None
        if name is not None:
            self.keep(name, output)
        return output
