"""Memory that has been freed goes back to the system: the C library keeps what threads free, hundreds of megabytes in time."""

import ctypes
import functools
import time
from collections.abc import Callable

EVERY_SECONDS = 3.0


class Tidy:
    """Hands freed memory back, every few seconds at most."""

    def __init__(self) -> None:
        self.next = 0.0

    def __call__(self) -> None:
        if time.monotonic() >= self.next:
            trimmer()(0)
            self.next = time.monotonic() + EVERY_SECONDS


@functools.cache
def trimmer() -> Callable[[int], object]:
    """What hands memory back: glibc's malloc_trim; other systems do so themselves."""
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return lambda _: None
