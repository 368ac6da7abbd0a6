"""Interception of nn.Module calls: which module runs inside which, without slowing torch's own encoder layers down.

A torch function mode makes those layers slow, so it is popped while they run. They look their functions up by name, so those
names are patched meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id as backward
from torch._C import _push_on_torch_function_stack as push

from regard.observe.interception.attention_call import MissedCall
from regard.observe.interception.functions.torch_modules import TORCH_PATCHES
from regard.observe.interception.patching import AttributePatch
from regard.observe.interception.recurrent.token_mixers import can_mix_tokens, report_token_mixer
from regard.observe.interception.thread_state import (
    STATE,
    TRACED,
    activate_watchers,
    keep_mode,
    notify_other_threads,
    pop_frame,
    pop_mode,
    push_frame,
)

ENTRYWISE_OR_STRIDED = {  # where the classes are of modules through which positions are followed by their result alone
    f"torch.nn.modules.{name}" for name in ("linear", "conv", "pooling", "activation", "normalization", "batchnorm", "dropout")
}
FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def build_patches() -> list[AttributePatch]:
    """Return the attribute patch for `nn.Module.__call__`."""
    call = vars(nn.Module)["__call__"]

    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if STATE.is_in_skippable:
            return call(self, *args, **kwargs)
        if not STATE.frames:
            activate_watchers()
        if not STATE.is_active:
            return call_unwatched(call, self, *args, **kwargs)
        passes = len(args) == 1 and not kwargs and id(self) in STATE.skippable_modules and not may_move_pixels(self)
        output = call_skippable(call, self, *args) if passes else call_in_frame(call, self, *args, **kwargs)
        if STATE.frames:
            with torch._C.DisableTorchFunction():
                STATE.mode.follow_child(self, args, kwargs, output)
        return output

    return [(nn.Module, "__call__", call_module)]


def may_move_pixels(module: nn.Module) -> bool:
    """Return whether a module may move pixels of this forward's images, so that its functions have to be seen."""
    if STATE.mode is None or not STATE.mode.positions.stored:
        return False
    return bool(module._modules) or type(module).__module__ not in ENTRYWISE_OR_STRIDED


def call_skippable(call: Callable[..., Any], module: nn.Module, *args: Any) -> Any:
    """Call a module that cannot attend, with the torch function mode popped."""
    if module._forward_hooks or module._forward_pre_hooks:
        return call_in_frame(call, module, *args)
    if not STATE.frames:
        keep_mode(module)
        return call(module, *args)
    if not pop_mode():
        return call_in_frame(call, module, *args)
    return call_without_mode(call, module, STATE.mode, args)


def call_without_mode(call: Callable[..., Any], module: nn.Module, mode: Any, args: Any) -> Any:
    """Call a module that cannot attend once the torch function mode was popped, and push it again."""
    STATE.is_in_skippable = True
    try:
        return call(module, *args)
    finally:
        STATE.is_in_skippable = False
        push(mode)


def call_in_frame(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module inside a new frame, so that the attention calls in it are intercepted."""
    frame = push_frame(module, args, kwargs)
    try:
        if isinstance(module, FAST) != STATE.is_in_fast_path:
            with switch_interception(not STATE.is_in_fast_path):
                return call(module, *args, **kwargs)
        result = call(module, *args, **kwargs)
        if frame.has_operations and (frame.multiplies_scores or can_mix_tokens(module)):
            report_token_mixer(module, frame.multiplies_scores)
        if len(STATE.frames) == 1 and STATE.mode.undivided.notes:
            STATE.mode.report_undivided()
        return result
    finally:
        pop_frame(frame)


@contextmanager
def switch_interception(fast: bool) -> Iterator[None]:
    """Pop the torch function mode and patch the names while the context is active if `fast`; else push the mode again."""
    before, STATE.is_in_fast_path = STATE.is_in_fast_path, fast
    try:
        if fast:
            was_on_top = pop_mode()
            with TORCH_PATCHES:
                yield
        else:
            was_on_top = False
            push(STATE.mode)
            yield
    finally:
        STATE.is_in_fast_path = before
        if fast and was_on_top:
            push(STATE.mode)
        elif not fast:
            pop_mode()


def call_unwatched(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module that is not recorded here; report torch.jit tracing and modules that other threads or tasks watch."""
    if STATE.watchers and torch._C._get_tracing_state() is not None and not STATE.pause_depth:
        for watcher in STATE.watchers:
            if watcher.names.get(id(module)) == "":
                watcher.report_missed(MissedCall("torch.jit.trace", "", TRACED))
    ours = STATE.watchers or STATE.is_in_unwatched or backward() != -1  # a backward pass only recomputes
    if ours or not notify_other_threads(module):
        return call(module, *args, **kwargs)
    STATE.is_in_unwatched = True
    try:
        return call(module, *args, **kwargs)
    finally:
        STATE.is_in_unwatched = False
