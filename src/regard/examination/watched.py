"""Forward hooks that report the inputs and output of each part of a module."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

See = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


@contextlib.contextmanager
def watched(module: nn.Module, see: See) -> Iterator[None]:
    """Call see(name, part, inputs, named, output) for each part that runs in the block, in order of completion."""

    def telling(name: str) -> Callable[..., None]:
        return lambda part, inputs, named, output: see(name, part, inputs, named, output)

    parts = [(name, part) for name, part in module.named_modules() if name]
    hooks = [part.register_forward_hook(telling(name), with_kwargs=True) for name, part in parts]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
