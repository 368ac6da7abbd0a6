"""The residual stream: the outputs of a model's blocks, which are found by where its attention runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from regard.observe.interception.functions.nested_tensors import nest_like, pad_nested
from regard.observe.interception.thread_state import STATE
from regard.observe.recorded_runs.run import Call

# path of a module, its output (b, t, c), and the first tensor that it was given, if any, to another output, or None
BlockHandler = Callable[[str, Tensor, Tensor | None], Tensor | None]


@contextmanager
def watch_blocks(modules: Mapping[str, nn.Module], handle: BlockHandler) -> Iterator[None]:
    """Pass the output (b, t, c) of every module that stands in a list of modules to a handler while the context is active.

    A tensor that the handler returns takes the output's place. The first tensor of a tuple is its output.
    """
    hooks = {module: make_hook(name, handle) for name, module in modules.items() if name.rpartition(".")[2].isdigit()}
    fast = {module for module in hooks if isinstance(module, nn.TransformerEncoderLayer) and not module._forward_hooks}

    def handle_fast(module: nn.Module, args: Any, output: Any) -> Any:
        return hooks[module](module, args, {}, output) if module in fast else None

    with ExitStack() as stack:
        for module in hooks.keys() - fast:
            stack.callback(module.register_forward_hook(hooks[module], with_kwargs=True).remove)
        if fast:  # a hook of its own would disable the fast path of torch's layer
            stack.callback(register_module_forward_hook(handle_fast).remove)  # torch leaves something of those with_kwargs
        yield


def make_hook(name: str, handle: BlockHandler) -> Callable[[nn.Module, Any, Any, Any], Any]:
    """Return the forward hook of a module; what runs in a backward or in another thread is passed by."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor) or first.dim() != 3 or not first.is_floating_point() or not STATE.is_active:
            return None
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        new = handle(name, pad_nested(first), None if given is None else pad_nested(given))
        new = None if new is None else nest_like(new, first)
        return new if new is None or first is output else (new, *output[1:])

    return hook


@dataclass(frozen=True, eq=False)
class BlockStream:
    """The output (b, t, c) of a block, by its path and its place in a list, which a call keeps as the residual stream."""

    call: Call
    block: str
    place: int
    output: Tensor

    def drop_branch(self, given: Tensor | None) -> None:
        """Drop the output from its call unless the next module of the list was given the same vector at some place.

        The output of a branch is added to the stream everywhere; other things, as features of an image, to some tokens.
        """
        x, y = self.output, given
        if y is None or (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
            return
        if self.call.history.block == self.block and not ((x == y) | x.isnan()).all(-1).any():
            self.call.history.block = self.call.stored.residual = None
