"""Memory that a step frees is kept for the next one: glibc gives large pieces back to the system, which clears them anew.

docs/benchmarks.md has what that is worth. Elsewhere than on Linux with glibc these do nothing.
"""

import ctypes
from functools import cache
from typing import Any

TRIM, LARGE = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
USUAL, MOST = 2**25, 2**30  # what LARGE grows to by itself, and beyond which even now a piece has its own mapping


def keep() -> None:
    """From now on what is freed stays with the process."""
    told(MOST, 2**31 - 1)


def as_usual() -> None:
    """Back to what glibc does by itself; what is free is given back."""
    told(USUAL, 2 * USUAL)
    if library() is not None:
        library().malloc_trim(0)


def told(large: int, trim: int) -> None:
    """Sets both thresholds, in bytes."""
    if library() is not None:
        library().mallopt(LARGE, large)
        library().mallopt(TRIM, trim)


@cache
def library() -> Any:
    """The C library of this process, where it is glibc."""
    try:
        found = ctypes.CDLL(None)
        return found if hasattr(found, "gnu_get_libc_version") and hasattr(found, "mallopt") else None
    except OSError:
        return None
