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

from regard.observe.doors import additive, calls, compiled, flex, functional, registry, scripted, states
from regard.observe.doors.harmless import harmless
from regard.observe.doors.names import Names, Patch
from regard.observe.doors.scene import ENTERED, OPEN, SCENE, Entry, Watcher, look_around, remove_mode

__all__ = ["watching"]


def patches() -> list[Patch]:
    """Return the attribute patches that are active while any thread watches a model."""
    ours = registry.patches() + calls.patches() + additive.patches() + states.patches() + scripted.patches()
    return ours + compiled.patches(ALL.add)


ALL = Names(patches)
NUMBERS = count()


@contextmanager
def watching(watcher: Watcher, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Dispatch every attention call of these modules in this thread to a watcher while the context is active."""
    entry, scene = Entry(watcher, SCENE.frames, next(NUMBERS)), vars(SCENE)  # of this thread, whichever thread exits
    with ALL, flex.NAMES:
        if watcher.changes:
            flex.NAMES.add(flex.patches(modules[""]))
        if SCENE.mode is None:
            SCENE.mode = functional.Functions()
            if not is_in_generator():
                SCENE.stays = True
                push(SCENE.mode)
        SCENE.harmless |= harmless(modules.values())
        SCENE.entries.append(entry)
        OPEN.append(entry)
        ENTERED.set(ENTERED.get() | {entry.number})
        look_around(anew=True)
        try:
            yield
        finally:
            OPEN.remove(entry)
            scene["entries"].remove(entry)
            if watcher in scene["watchers"]:
                scene["watchers"].remove(watcher)
            ENTERED.set(ENTERED.get() - {entry.number})
            if not scene["entries"]:
                shut(scene)


def is_in_generator() -> bool:
    """Return whether a generator or a coroutine enters the context.

    Another thread may close it, so no torch function mode may be left on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("regard", "contextlib"):
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR))


def shut(scene: dict[str, Any]) -> None:
    """Clear the state of a thread and pop its torch function mode if it is still on the stack."""
    if scene is vars(SCENE):
        remove_mode()
    scene.update(mode=None, stays=False, context=None)
    for name in ("harmless", "frames", "masks", "turned"):
        scene[name].clear()
