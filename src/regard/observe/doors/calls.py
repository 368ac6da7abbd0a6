"""The door of modules: which of them runs inside which, and torch's own encoder layers kept as fast as they are.

Those turn slow where a mode of functions is on, so it is taken away while they run; they look their functions up by
name, and for that while the names stand for ours.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _push_on_torch_function_stack as push

from regard.observe.doors.by_hand import HARMLESS
from regard.observe.doors.names import Patch
from regard.observe.doors.passage import Missed
from regard.observe.doors.scene import SCENE, TRACED, Watcher, begin, end, take_mode_away
from regard.observe.doors.torch_modules import BY_NAME

FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
ALONE = "it ran in a thread of its own, which no recording watches: call record inside that thread"
OPEN: list[tuple[Watcher, list[Any]]] = []  # every watcher, and what runs in its thread


def patches() -> list[Patch]:
    """What stands in for the call of a module."""
    call = vars(nn.Module)["__call__"]

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if SCENE.passed:
            return call(self, *args, **kwargs)
        if not SCENE.live:
            return aside(call, self, *args, **kwargs)
        passes = len(args) == 1 and not kwargs and id(self) in SCENE.harmless  # of two, it might make pairs
        output = passed(call, self, args[0]) if passes else framed(call, self, *args, **kwargs)
        frames = SCENE.frames
        if frames:
            with torch._C.DisableTorchFunction():
                frames[-1].note(args, kwargs, output, child=True)
                followed = SCENE.mode.followed
                if passes and (followed.scores or (isinstance(args[0], Tensor) and args[0].dim() > 3)):
                    followed.note(frames[-1], HARMLESS, args, {}, output)  # it keeps scores, and may make them of pairs
        return output

    return [(nn.Module, "__call__", called)]


def passed(call: Callable[..., Any], module: nn.Module, x: Any) -> Any:
    """A module that cannot attend runs, and nobody looks."""
    if module._forward_hooks or module._forward_pre_hooks or not take_mode_away():
        return framed(call, module, x)
    SCENE.passed = True
    try:
        return call(module, x)
    finally:
        SCENE.passed = False
        push(SCENE.mode)


def framed(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module runs, and what runs inside is seen."""
    frame = begin(module, args, kwargs)
    try:
        if isinstance(module, FAST) == SCENE.fast:
            return call(module, *args, **kwargs)
        with turned(not SCENE.fast):
            return call(module, *args, **kwargs)
    finally:
        end(frame)


@contextmanager
def turned(fast: bool) -> Iterator[None]:
    """A context without the mode of functions and with the names, or the reverse inside it."""
    before, SCENE.fast = SCENE.fast, fast
    try:
        if fast:
            taken = take_mode_away()
            with BY_NAME:
                yield
        else:
            taken = False
            push(SCENE.mode)
            yield
    finally:
        SCENE.fast = before
        if fast and taken:
            push(SCENE.mode)
        elif not fast:
            take_mode_away()


def aside(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module runs where nobody looks; where that is torch.jit's tracing or a thread of a watched forward, it is missed."""
    if SCENE.watchers and torch._C._get_tracing_state() is not None and not SCENE.quiet:
        tell([watcher for watcher in SCENE.watchers if watcher.names.get(id(module)) == ""], module, "torch.jit.trace", TRACED)
    if SCENE.watchers or SCENE.stray:
        return call(module, *args, **kwargs)
    around = [watcher for watcher, frames in list(OPEN) if frames and frames[0].module is not module]
    tell(around, module, "threads", ALONE)
    SCENE.stray = True
    try:
        return call(module, *args, **kwargs)
    finally:
        SCENE.stray = False


def tell(watchers: list[Watcher], module: nn.Module, kernel: str, reason: str) -> None:
    """Tells those who watch a module that it was missed."""
    for watcher in watchers:
        if id(module) in watcher.names or getattr(module, "_is_replica", False):  # of nn.DataParallel
            watcher.miss(Missed(kernel, watcher.names.get(id(module), ""), reason))
