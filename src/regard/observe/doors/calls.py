"""The door of modules: which of them runs inside which, and torch's own encoder layers kept as fast as they are.

Those turn slow where a mode of functions is on, so it is taken away while they run; they look their functions up by
name, and for that while the names stand for ours.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id as backward
from torch._C import _push_on_torch_function_stack as push

from regard.observe.doors.names import Patch
from regard.observe.doors.passage import Missed
from regard.observe.doors.scene import SCENE, TRACED, begin, end, look_around, stay, take_mode_away, tell_others
from regard.observe.doors.torch_modules import BY_NAME

FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def patches() -> list[Patch]:
    """What stands in for the call of a module."""
    call = vars(nn.Module)["__call__"]

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if SCENE.passed:
            return call(self, *args, **kwargs)
        if not SCENE.frames:
            look_around()
        if not SCENE.live:
            return aside(call, self, *args, **kwargs)
        passes = len(args) == 1 and not kwargs and id(self) in SCENE.harmless  # of two, it might make pairs
        output = passed(call, self, args[0]) if passes else framed(call, self, *args, **kwargs)
        frames = SCENE.frames
        if frames:
            with torch._C.DisableTorchFunction():
                if passes and isinstance(args[0], Tensor):
                    SCENE.mode.followed.note_child(frames[-1], self, args[0], output)  # it keeps scores, or makes them of pairs
                frames[-1].note(args, kwargs, output, child=True)
        return output

    return [(nn.Module, "__call__", called)]


def passed(call: Callable[..., Any], module: nn.Module, x: Any) -> Any:
    """A module that cannot attend runs, and nobody looks."""
    if module._forward_hooks or module._forward_pre_hooks:
        return framed(call, module, x)
    if not SCENE.frames:
        stay(module)
        return call(module, x)
    if not take_mode_away():
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
    """A module runs where nobody looks; where that is torch.jit's tracing, or another thread or task, it is missed."""
    if SCENE.watchers and torch._C._get_tracing_state() is not None and not SCENE.quiet:
        for watcher in SCENE.watchers:
            if watcher.names.get(id(module)) == "":
                watcher.miss(Missed("torch.jit.trace", "", TRACED))
    ours = SCENE.watchers or SCENE.stray or backward() != -1  # in a backward pass runs what was seen before
    if ours or not tell_others(module):
        return call(module, *args, **kwargs)
    SCENE.stray = True
    try:
        return call(module, *args, **kwargs)
    finally:
        SCENE.stray = False
