"""Interception of attention calls: install the hooks around a model while it is watched, and remove them."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from itertools import count
from types import FrameType
from typing import Any

from torch import nn
from torch._C import _push_on_torch_function_stack as push

from regard.observe.interception import function_mode, module_calls, reentrant_checkpoints, started_threads
from regard.observe.interception.compiled import torch_compile
from regard.observe.interception.functions import additive, beam_rows, block_sparse, flex, hf_registry, shared_rows
from regard.observe.interception.patching import AttributePatch, PatchSet
from regard.observe.interception.recurrent import recurrences
from regard.observe.interception.skippable import find_skippable
from regard.observe.interception.thread_state import (
    ENTERED_ENTRIES,
    OPEN_ENTRIES,
    STATE,
    Watcher,
    WatcherEntry,
    activate_watchers,
    remove_mode,
)

__all__ = ["watch_modules"]


def build_patches() -> list[AttributePatch]:
    """Return the attribute patches that are active while any thread watches a model."""
    ours = (
        hf_registry.build_patches()
        + module_calls.build_patches()
        + additive.build_patches()
        + beam_rows.build_patches()
        + block_sparse.build_patches()
        + started_threads.build_patches()
        + recurrences.build_patches()
        + shared_rows.build_patches()
        + reentrant_checkpoints.build_patches()
    )
    return ours + torch_compile.build_patches(ALL_PATCHES.apply)


ALL_PATCHES = PatchSet(build_patches)
ENTRY_NUMBERS = count()


@contextmanager
def watch_modules(watcher: Watcher, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Dispatch every attention call of these modules in this thread to a watcher while the context is active."""
    entry = WatcherEntry(watcher, STATE.frames, next(ENTRY_NUMBERS))
    state = vars(STATE)  # of this thread, whichever thread exits
    with ALL_PATCHES, flex.FLEX_PATCHES:
        if watcher.can_change_calls:
            flex.FLEX_PATCHES.apply(flex.build_patches(modules[""]))
        if STATE.mode is None:
            STATE.mode = function_mode.AttentionFunctionMode()
            if not is_in_generator():
                STATE.keeps_mode = True
                push(STATE.mode)
        STATE.skippable_modules |= find_skippable(modules.values())
        STATE.entries.append(entry)
        OPEN_ENTRIES.append(entry)
        ENTERED_ENTRIES.set(ENTERED_ENTRIES.get() | {entry.number})
        activate_watchers(anew=True)
        try:
            yield
        finally:
            OPEN_ENTRIES.remove(entry)
            state["entries"].remove(entry)
            if watcher in state["watchers"]:
                state["watchers"].remove(watcher)
            ENTERED_ENTRIES.set(ENTERED_ENTRIES.get() - {entry.number})
            if not state["entries"]:
                reset_state(state)


def is_in_generator() -> bool:
    """Return whether a generator or a coroutine enters the context.

    Another thread may close it, so no torch function mode may be left on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("regard", "contextlib"):
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR))


def reset_state(state: dict[str, Any]) -> None:
    """Clear the state of a thread and pop its torch function mode if it is still on the stack."""
    if state is vars(STATE):
        remove_mode()
    state.update(mode=None, keeps_mode=False, context=None)
    for name in ("skippable_modules", "frames", "inferred_masks", "parent_rows"):
        state[name].clear()
