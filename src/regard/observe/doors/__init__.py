"""The doors through which calls of attention pass, and how they are opened and shut."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch._C import _len_torch_function_stack as height
from torch._C import _pop_torch_function_stack as pop
from torch._C import _push_on_torch_function_stack as push

from regard.observe.doors import additive, calls, compiled, flex, functional, registry, states
from regard.observe.doors.harmless import harmless
from regard.observe.doors.names import Names, Patch
from regard.observe.doors.scene import SCENE, Watcher

__all__ = ["watching"]


def patches() -> list[Patch]:
    """What stands for something else while anyone, in any thread, watches."""
    return registry.patches() + calls.patches() + additive.patches() + states.patches() + compiled.patches(ALL.add)


ALL = Names(patches)


@contextmanager
def watching(watcher: Watcher, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """A context in which a watcher of this thread meets every call of attention in these modules of a model."""
    watchers, entry = SCENE.watchers, (watcher, SCENE.frames)
    with ALL, flex.NAMES:
        if watcher.changes:
            flex.NAMES.add(flex.patches(modules[""]))
        if SCENE.mode is None:
            SCENE.mode = functional.Functions()
            push(SCENE.mode)
        SCENE.harmless |= harmless(modules.values())
        watchers.append(watcher)
        watchers.sort(key=lambda one: one.changes)
        calls.OPEN.append(entry)
        try:
            yield
        finally:
            watchers.remove(watcher)
            calls.OPEN.remove(entry)
            if watchers is SCENE.watchers and not watchers:
                shut()


def shut() -> None:
    """Takes the mode of this thread away, from under others that were entered after it, and forgets what ran."""
    above = []
    while height():
        mode = pop()
        if mode is SCENE.mode:
            break
        above.append(mode)
    for one in reversed(above):
        push(one)
    SCENE.mode = None
    SCENE.harmless.clear()
    SCENE.frames.clear()
    SCENE.masks.clear()
    SCENE.turned.clear()
