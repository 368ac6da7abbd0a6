"""Find the function outside of attention that carries a token to earlier ones: a convolution, a norm over tokens, a roll."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CONVOLVE = (
    "Pad a convolution over tokens on the left only: F.pad(x, (kernel_size - 1, 0)) before a convolution with padding=0, or "
    "cut what padding adds on the right."
)
NORMALIZE = (
    "Normalize each token alone, with nn.LayerNorm or nn.RMSNorm over the last axis: its statistics include other tokens."
)
SHIFT = "It brings the last tokens to the front: to shift tokens, put zeros before them, F.pad(x, (0, 0, n, 0))[:, :-n]."
AVERAGE = "Take it over each token and those before it, such as x.cumsum(1) / torch.arange(1, t + 1)[:, None]."
CURES = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d"), CONVOLVE),
    **dict.fromkeys(("group_norm", "batch_norm", "instance_norm", "layer_norm", "rms_norm", "normalize"), NORMALIZE),
    **dict.fromkeys(("roll", "flip"), SHIFT),
    **dict.fromkeys(("mean", "var", "std", "avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "interpolate"), AVERAGE),
}


class MixingFunction(NamedTuple):
    """The name of a function that carries a token to earlier ones, and the module in which it ran, "" for the layer itself."""

    name: str
    module: str

    @property
    def cure(self) -> str:
        """What to do instead."""
        return CURES[self.name]

    def describe(self) -> str:
        """Return the function and its module in words."""
        return f"{self.name} in {self.module}" if self.module else self.name


class FunctionCall(NamedTuple):
    """A call of a function: where it ran, its first tensor and its result."""

    found: MixingFunction
    given: Tensor
    made: Tensor


class FunctionRecorder(TorchFunctionMode):
    """A torch function mode that keeps the calls of functions in CURES."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running, self.calls = running, list[FunctionCall]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(getattr(func, "__name__", ""))
        if name in CURES and isinstance(result, Tensor) and args and isinstance(args[0], Tensor):
            where = MixingFunction(name, self.running[-1] if self.running else "")
            self.calls.append(FunctionCall(where, args[0].detach().clone(), result.detach().clone()))
        return result


def find_mixing_function(
    module: nn.Module, call: Callable[[Tensor], object], x: Tensor, changed: Tensor, j: int
) -> MixingFunction | None:
    """Return the first function whose result differs before token j, though what it was given differs only at j.

    `x` and `changed`, (b, t, c), differ only in token j. None if there is none.
    """
    first, second = (record_functions(module, call, one) for one in (x, changed))
    t = x.shape[1]
    for before, after in zip(first, second, strict=False):
        if before.found == after.found and before.given.shape == after.given.shape and carries_back(before, after, t, j):
            return before.found
    return None


def record_functions(module: nn.Module, call: Callable[[Tensor], object], x: Tensor) -> Sequence[FunctionCall]:
    """Return the calls of functions in CURES while a module runs."""
    with follow_modules(module) as running:
        recorder: FunctionRecorder = FunctionRecorder(running)
        with recorder, torch.no_grad():
            call(x)
    return recorder.calls


@contextmanager
def follow_modules(module: nn.Module) -> Iterator[list[str]]:
    """Keep the names of the running parts of a module in a list, the innermost last."""
    running: list[str] = []
    hooks = []
    for name, part in module.named_modules():
        if name:
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            hooks.append(part.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    try:
        yield running
    finally:
        for one in hooks:
            one.remove()


def carries_back(before: FunctionCall, after: FunctionCall, t: int, j: int) -> bool:
    """Return whether a function's result differs at a token before j along an axis along which its input differs only at j."""
    for axis, size in enumerate(before.given.shape):
        if size != t or find_changed_places(before.given, after.given, axis) != [j]:
            continue
        if before.made.dim() != before.given.dim() or before.made.shape[axis] < t:
            return not torch.equal(before.made, after.made)
        return any(place < j for place in find_changed_places(before.made, after.made, axis))
    return False


def find_changed_places(one: Tensor, other: Tensor, axis: int) -> list[int]:
    """Return the indices along an axis at which two tensors differ beyond rounding."""
    differences = (one - other).double().abs().movedim(axis, 0).flatten(1).amax(-1)
    return (differences > 1e-6 * float(one.double().abs().max())).nonzero().flatten().tolist()
