"""Keep memory that a step frees for the next one: glibc returns large blocks to the system, which clears them again.

docs/benchmarks.md has the measured effect. On other systems than Linux with glibc these functions do nothing.
"""

from regard.malloc import give_back, kept_up_to, large_from

USUAL, MOST = 2**25, 2**30  # glibc's own limit of its mmap threshold; ours, above which a block still has its own mapping


def keep() -> None:
    """Keep freed memory in the process from now on."""
    large_from(MOST)
    kept_up_to(2**31 - 1)


def as_usual() -> None:
    """Restore glibc's default behavior, and return free memory to the system."""
    large_from(USUAL)
    kept_up_to(2 * USUAL)
    give_back()
