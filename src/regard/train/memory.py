"""Memory that a step frees is kept for the next one: glibc gives large pieces back to the system, which clears them anew.

docs/benchmarks.md has what that is worth. Elsewhere than on Linux with glibc these do nothing.
"""

from regard.malloc import give_back, kept_up_to, large_from

USUAL, MOST = 2**25, 2**30  # what a large piece grows to by itself, and beyond which even now one has its own mapping


def keep() -> None:
    """From now on what is freed stays with the process."""
    large_from(MOST)
    kept_up_to(2**31 - 1)


def as_usual() -> None:
    """Back to what glibc does by itself; what is free is given back."""
    large_from(USUAL)
    kept_up_to(2 * USUAL)
    give_back()
