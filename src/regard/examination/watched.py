"""Watched: what each part of a module is given, and gives, while it runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

See = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None]


@contextlib.contextmanager
def watched(module: nn.Module, see: See) -> Iterator[None]:
    """A context in which see(name, part, inputs, named, output) is told of each part that has run, in the order they end."""

    def telling(name: str) -> Callable[..., None]:
        return lambda part, inputs, named, output: see(name, part, inputs, named, output)

    parts = [(name, part) for name, part in module.named_modules() if name]
    hooks = [part.register_forward_hook(telling(name), with_kwargs=True) for name, part in parts]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()
