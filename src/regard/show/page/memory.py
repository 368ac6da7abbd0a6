"""Return of freed memory to the system: the C library keeps what threads free, hundreds of megabytes in time."""

import time

from regard.malloc import give_back, large_from

EVERY_SECONDS = 3.0
LARGE_BYTES = 2**20  # glibc's own threshold grows with what is freed, up to 32 MiB


class Tidy:
    """Returns freed memory: large blocks at once, in the whole process; the rest when called, at most every few seconds."""

    def __init__(self) -> None:
        self.next = 0.0
        large_from(LARGE_BYTES)

    def due(self) -> bool:
        """Return whether the interval since the last call has passed."""
        return time.monotonic() >= self.next

    def __call__(self) -> None:
        if self.due():
            self.next = time.monotonic() + EVERY_SECONDS
            give_back()
