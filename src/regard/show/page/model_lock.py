"""Exclusive use of the model, as long as the client that waits for the result is connected."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def hold_model_lock(lock: threading.Lock, alive: Callable[[], None]) -> Iterator[None]:
    """Hold the lock in a context; alive() is called while this thread waits, and before each module that it runs."""
    with wait_for_lock(lock, alive), check_client_in_modules(alive):
        yield


@contextmanager
def wait_for_lock(lock: threading.Lock, alive: Callable[[], None]) -> Iterator[None]:
    """Hold the lock in a context; alive() is called while this thread waits."""
    while not lock.acquire(timeout=0.1):
        alive()
    try:
        yield
    finally:
        lock.release()


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
