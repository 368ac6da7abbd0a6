"""Record the calls of torch functions in a run with the modules they ran in, and find one that carries tokens back."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MOST = 2**22  # numbers of a result that is kept
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


def find_mixing_function(
    module: nn.Module, call: Callable[[Tensor], object], x: Tensor, changed: Tensor, j: int
) -> MixingFunction | None:
    """Return the first function whose result differs before token j, though what it was given differs only at j.

    `x` and `changed`, (b, t, c), differ only in token j. None if there is none.
    """
    first, second = (record_functions(CURES, partial(call, one), module) for one in (x, changed))
    for before, after in zip(first, second, strict=False):
        is_same = before[:2] == after[:2] and before.given.shape == after.given.shape
        if is_same and carries_back(before, after, x.shape[1], j):
            return MixingFunction(*before[:2])
    return None


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
