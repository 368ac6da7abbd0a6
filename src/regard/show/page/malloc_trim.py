"""Return of freed memory to the system: the C library keeps what threads free, hundreds of megabytes in time."""

import time

from regard.malloc import set_mmap_threshold, trim_heap

EVERY_SECONDS = 3.0
LARGE_BYTES = 2**20  # glibc's own threshold grows with what is freed, up to 32 MiB


class MemoryTrimmer:
    """Returns freed memory: large blocks at once, in the whole process; the rest when called, at most every few seconds."""

    def __init__(self) -> None:
        self.next = 0.0
        set_mmap_threshold(LARGE_BYTES)

    def is_due(self) -> bool:
        """Return whether the interval since the last call has passed."""
        return time.monotonic() >= self.next

    def __call__(self) -> None:
        if self.is_due():
            self.next = time.monotonic() + EVERY_SECONDS
            trim_heap()
