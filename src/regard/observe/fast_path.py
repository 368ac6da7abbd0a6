"""torch's fast path of encoder layers, which returns no context and is a setting of the process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class FastPath:
    """torch's fast path of encoder layers, a setting of the process: off while an intervention of any thread is open."""

    def __init__(self) -> None:
        self.lock, self.blocks, self.was_enabled = threading.Lock(), 0, True

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Disable the fast path in the context; the last one that ends sets it as it was before the first."""
        with self.lock:
            if not self.blocks:
                self.was_enabled = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if not self.blocks:
                    torch.backends.mha.set_fastpath_enabled(self.was_enabled)


FAST_PATH = FastPath()
