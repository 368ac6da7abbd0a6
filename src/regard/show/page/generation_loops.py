"""The compiled loops that Generate calls: compiled once for each model, in a thread, while a visitor who waits is told.

They are not compiled before a text asks for them: numba compiles one loop at a time, and other views would wait.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

from regard.models.loop_compilation import start_compilation
from regard.show.page.head_pictures import Alive
from regard.show.page.model_adapter import ModelAdapter, get_decoder
from regard.show.page.translator_adapter import TranslatorAdapter

PATIENCE_SECONDS = 2.0  # before a visitor is told, since to import numba and read the loops from the cache takes less


class GenerationLoops:
    """The loops that generation calls with each model of a page; several threads may use it at once."""

    def __init__(self) -> None:
        self._futures: dict[str, Future[None]] = {}
        self._lock = threading.Lock()

    def compile(self, adapter: ModelAdapter | TranslatorAdapter) -> "Future[None] | None":
        """Start to compile the loops of a model, unless that was done without an error; None if generation calls none."""
        model = get_decoder(adapter)
        with self._lock:
            known = self._futures.get(adapter.name)
            has_failed = known is not None and known.done() and known.exception() is not None
            if model is not None and (known is None or has_failed):
                self._futures[adapter.name] = start_compilation(model)
            return self._futures.get(adapter.name)

    def is_compiling(self) -> bool:
        """Return whether loops are compiled now."""
        with self._lock:
            return not all(one.done() for one in self._futures.values())

    def wait(self, adapter: ModelAdapter | TranslatorAdapter, alive: Alive) -> Iterator[dict[str, Any]]:
        """Wait until the loops of a model are compiled; yield a line that says so if that takes long."""
        future = self.compile(adapter)
        if future is None:
            return
        wait([future], PATIENCE_SECONDS)
        if not future.done():
            yield {"compiling": True}
        while not future.done():
            alive()
            wait([future], 0.1)
        future.result()
