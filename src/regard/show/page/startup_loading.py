"""Loading the models of a page in a thread, while the page is already served and shows how far it is."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol


class Progress(Protocol):
    """What is loaded now, and how much of it: `done` of `total` parts, 0 while the total is not known."""

    label: str
    done: int
    total: int


class StartupLoading:
    """Models that `load` returns, in a thread that `start` begins; its error is raised in those who wait."""

    def __init__(self, load: Callable[[], Sequence[Any]], progress: Progress) -> None:
        self.load, self.progress = load, progress
        self._future: Future[None] = Future()

    def start(self, use: Callable[[Sequence[Any]], None], end: Callable[[], None]) -> None:
        """Load the models, pass them to `use`, and call `end` also where that failed."""
        pool = ThreadPoolExecutor(1, "regard-loading")
        self._future = pool.submit(lambda: use(self.load()))
        self._future.add_done_callback(lambda _: end())
        pool.shutdown(wait=False)

    def is_running(self) -> bool:
        """Return whether something is still loaded."""
        return not self._future.done()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until all is loaded or the time is up. Raises the error of loading."""
        wait([self._future], timeout_seconds)
        if self._future.done():
            self._future.result()

    def describe(self) -> dict[str, Any]:
        """Return what is loaded, and the share of it that is done, None if not known. Raises the error of loading."""
        self.wait(0)
        done, total = self.progress.done, self.progress.total
        return {"label": self.progress.label, "share": min(done / total, 1.0) if total else None}
