"""The C library's rules for freed memory: which pieces go back to the system, and when. Without glibc nothing is done."""

import ctypes
from functools import cache
from typing import Any

TRIM, LARGE = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


def large_from(count: int) -> None:
    """Pieces of so many bytes or more are asked of the system by themselves, and go back as soon as they are freed."""
    if library() is not None:
        library().mallopt(LARGE, count)


def kept_up_to(count: int) -> None:
    """So many bytes of what is free, at the end of the heap, stay with the process."""
    if library() is not None:
        library().mallopt(TRIM, count)


def give_back() -> None:
    """What is free goes back now."""
    if library() is not None:
        library().malloc_trim(0)


@cache
def library() -> Any:
    """The C library of this process, where it is glibc."""
    try:
        found = ctypes.CDLL(None)
        return found if hasattr(found, "gnu_get_libc_version") and hasattr(found, "mallopt") else None
    except (OSError, TypeError):  # on Windows None is refused
        return None
