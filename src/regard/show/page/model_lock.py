"""Exclusive use of the model, as long as the client that waits for the result is connected."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def hold_model_lock(lock: threading.Lock, alive: Callable[[], None]) -> Iterator[None]:
    """Hold the lock in a context; alive() is called while this thread waits, and before each module that it runs."""
    own = threading.get_ident()

    def check_client(*_: object) -> None:
        if threading.get_ident() == own:  # global hooks run in other threads too
            alive()

    while not lock.acquire(timeout=0.1):
        alive()
    asking = register_module_forward_pre_hook(
        check_client
    )  # a hook of one module would disable the fast path of torch's own layers
    try:
        yield
    finally:
        asking.remove()
        lock.release()
