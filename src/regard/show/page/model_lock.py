"""Exclusive use of the model, as long as the client that waits for the result is connected."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook


class PriorityLock:
    """A lock that goes to the thread of the highest priority among those that wait."""

    def __init__(self) -> None:
        self.is_held, self._changed = False, threading.Condition()
        self._priorities: list[float] = []  # of the threads that wait

    @contextmanager
    def hold(self, alive: Callable[[], None], priority: float = math.inf) -> Iterator[None]:
        """Hold the lock in a context; alive() is called while this thread waits."""
        with self._changed:
            self._priorities.append(priority)
            try:
                while self.is_held or priority < max(self._priorities):
                    self._changed.wait(0.1)
                    alive()
                self.is_held = True
            finally:
                self._priorities.remove(priority)
        try:
            yield
        finally:
            with self._changed:
                self.is_held = False
                self._changed.notify_all()

    def iterate(self, items: Iterator[Any], alive: Callable[[], None], priority: float) -> Iterator[Any]:
        """Yield what an iterator computes; the lock is held while it computes an item, and free in between."""
        while True:
            with self.hold(alive, priority):
                item = next(items, None)
            if item is None:
                return
            yield item


@contextmanager
def hold_model_lock(lock: PriorityLock, alive: Callable[[], None]) -> Iterator[None]:
    """Hold the lock in a context; alive() is called while this thread waits, and before each module that it runs."""
    with lock.hold(alive), check_client_in_modules(alive):
        yield


@contextmanager
def check_client_in_modules(alive: Callable[[], None]) -> Iterator[None]:
    """Call alive() before each module that this thread runs in a context; its global hook keeps models from compiled code."""
    own = threading.get_ident()

    def check_client(*_: object) -> None:
        if threading.get_ident() == own:  # global hooks run in other threads too
            alive()

    # a hook of one module would disable the fast path of torch's own layers
    asking = register_module_forward_pre_hook(check_client)
    try:
        yield
    finally:
        asking.remove()
