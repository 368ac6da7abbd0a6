"""glibc's settings for freed memory: which blocks go back to the system, and when. Does nothing without glibc."""

import ctypes
from functools import cache
from typing import Any

TRIM, LARGE = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
USUAL, MOST = 2**25, 2**30  # glibc's own limit of its mmap threshold; ours, above which a block still has its own mapping


def keep_freed_memory() -> None:
    """Keep freed memory in the process from now on: the system would clear it again, see docs/benchmarks.md."""
    set_mmap_threshold(MOST)
    set_trim_threshold(2**31 - 1)


def restore_malloc_defaults() -> None:
    """Restore glibc's default behavior, and return free memory to the system."""
    set_mmap_threshold(USUAL)
    set_trim_threshold(2 * USUAL)
    trim_heap()


def set_mmap_threshold(count: int) -> None:
    """Allocate blocks of `count` bytes or more by mmap, so that they go back to the system as soon as they are freed."""
    if find_glibc() is not None:
        find_glibc().mallopt(LARGE, count)


def set_trim_threshold(count: int) -> None:
    """Keep up to `count` free bytes at the end of the heap in the process."""
    if find_glibc() is not None:
        find_glibc().mallopt(TRIM, count)


def trim_heap() -> None:
    """Return free memory to the system now."""
    if find_glibc() is not None:
        find_glibc().malloc_trim(0)


@cache
def find_glibc() -> Any:
    """Return the C library of this process if it is glibc, else None."""
    try:
        found = ctypes.CDLL(None)
        return found if hasattr(found, "gnu_get_libc_version") and hasattr(found, "mallopt") else None
    except (OSError, TypeError):  # CDLL(None) raises on Windows
        return None
