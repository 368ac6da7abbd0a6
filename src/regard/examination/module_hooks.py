"""Forward hooks that report the inputs and output of each part of a module."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

PartCallback = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


@contextlib.contextmanager
def hook_parts(module: nn.Module, callback: PartCallback) -> Iterator[None]:
    """Call see(name, part, inputs, named, output) for each part that runs in the block, in order of completion."""

    def make_hook(name: str) -> Callable[..., None]:
        return lambda part, inputs, named, output: callback(name, part, inputs, named, output)

    parts = [(name, part) for name, part in module.named_modules() if name]
    hooks = [part.register_forward_hook(make_hook(name), with_kwargs=True) for name, part in parts]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
