"""Interception of nn.Module calls: which module runs inside which, without slowing torch's own encoder layers down.

A torch function mode makes those layers slow, so it is popped while they run. They look their functions up by name, so those
names are patched meanwhile.
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
    """Return the attribute patch for `nn.Module.__call__`."""
    call = vars(nn.Module)["__call__"]

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if SCENE.passed:
            return call(self, *args, **kwargs)
        if not SCENE.frames:
            look_around()
        if not SCENE.live:
            return aside(call, self, *args, **kwargs)
        passes = len(args) == 1 and not kwargs and id(self) in SCENE.harmless  # two arguments could form pairs of tokens
        output = passed(call, self, args[0]) if passes else framed(call, self, *args, **kwargs)
        frames = SCENE.frames
        if frames:
            with torch._C.DisableTorchFunction():
                if passes and isinstance(args[0], Tensor):
                    SCENE.mode.followed.note_child(frames[-1], self, args[0], output)  # maybe scores of pairs
                frames[-1].note(args, kwargs, output, child=True)
        return output

    return [(nn.Module, "__call__", called)]


def passed(call: Callable[..., Any], module: nn.Module, x: Any) -> Any:
    """Call a module that cannot attend, with the torch function mode popped."""
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
    """Call a module inside a new frame, so that the attention calls in it are intercepted."""
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
    """Pop the torch function mode and patch the names while the context is active if `fast`; else push the mode again."""
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
    """Call a module that is not recorded here; report torch.jit tracing and modules that other threads or tasks watch."""
    if SCENE.watchers and torch._C._get_tracing_state() is not None and not SCENE.quiet:
        for watcher in SCENE.watchers:
            if watcher.names.get(id(module)) == "":
                watcher.miss(Missed("torch.jit.trace", "", TRACED))
    ours = SCENE.watchers or SCENE.stray or backward() != -1  # a backward pass only recomputes
    if ours or not tell_others(module):
        return call(module, *args, **kwargs)
    SCENE.stray = True
    try:
        return call(module, *args, **kwargs)
    finally:
        SCENE.stray = False
