"""Keep memory that a step frees for the next one: glibc returns large blocks to the system, which clears them again.

docs/benchmarks.md has the measured effect. On other systems than Linux with glibc these functions do nothing.
"""

from regard.malloc import set_mmap_threshold, set_trim_threshold, trim_heap

USUAL, MOST = 2**25, 2**30  # glibc's own limit of its mmap threshold; ours, above which a block still has its own mapping


def keep_freed_memory() -> None:
    """Keep freed memory in the process from now on."""
    set_mmap_threshold(MOST)
    set_trim_threshold(2**31 - 1)


def restore_malloc_defaults() -> None:
    """Restore glibc's default behavior, and return free memory to the system."""
    set_mmap_threshold(USUAL)
    set_trim_threshold(2 * USUAL)
    trim_heap()
