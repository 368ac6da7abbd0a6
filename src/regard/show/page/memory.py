"""Memory that has been freed goes back to the system: the C library keeps what threads free, hundreds of megabytes in time."""

import ctypes
import functools
import time
from typing import Any

EVERY_SECONDS = 3.0
LARGE_BYTES = 2**20  # what is larger is asked of the system by itself, and goes back as soon as it is freed
THRESHOLD = -3  # M_MMAP_THRESHOLD, in malloc.h


class Tidy:
    """Hands freed memory back: what is large at once, in the whole process; the rest when called, every few seconds at most."""

    def __init__(self) -> None:
        self.next = 0.0
        library = glibc()
        if library is not None:
            library.mallopt(THRESHOLD, LARGE_BYTES)  # a bound of its own grows with what is freed, up to 32 MB

    def due(self) -> bool:
        """Whether it is time again."""
        return time.monotonic() >= self.next

    def __call__(self) -> None:
        if self.due():
            self.next = time.monotonic() + EVERY_SECONDS
            library = glibc()
            if library is not None:
                library.malloc_trim(0)


@functools.cache
def glibc() -> Any:
    """The C library, where it is glibc; others hand memory back by themselves."""
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
