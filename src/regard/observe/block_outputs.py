"""The residual stream: the outputs of a model's blocks, which are found by where its attention runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from regard.observe.interception.thread_state import STATE

BlockHandler = Callable[[str, Tensor], Tensor | None]  # path of a module and its output (b, t, c) to another output, or None


@contextmanager
def watch_blocks(modules: Mapping[str, nn.Module], handle: BlockHandler) -> Iterator[None]:
    """Pass the output (b, t, c) of every module that stands in a list of modules to a handler while the context is active.

    A tensor that the handler returns takes the output's place. The first tensor of a tuple is its output.
    """
    with ExitStack() as stack:
        for name, module in modules.items():
            if name.rpartition(".")[2].isdigit():
                hook = module.register_forward_hook(make_hook(name, handle))
                stack.callback(hook.remove)
        yield


def make_hook(name: str, handle: BlockHandler) -> Callable[[nn.Module, Any, Any], Any]:
    """Return the forward hook of a module; what runs in a backward or in another thread is passed by."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor) or first.dim() != 3 or not first.is_floating_point() or not STATE.is_active:
            return None
        new = handle(name, first)
        return new if new is None or first is output else (new, *output[1:])

    return hook


def is_inside(name: str, block: str) -> bool:
    """Return whether a module's path is that of a block or of a part of it."""
    return name == block or name.startswith(f"{block}.")
