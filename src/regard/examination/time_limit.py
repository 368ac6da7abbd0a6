"""A limit on time: an exception in the thread of an examination, once the time is over."""

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Iterator

from regard.errors import ConfigError
from regard.mechanism.arguments import check_number

AGAIN_SECONDS = 1.0  # until it is raised again, where the subject has caught it


class TimeLimitError(BaseException):
    """The time is over: no Exception, since code that catches whatever a subject raises must not catch it."""


class TimeLimit:
    """Seconds from now; None: no limit. Raises ConfigError for what is no positive number of seconds."""

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not 0 < check_number("a time limit", seconds, " of seconds, or None") < math.inf:
            raise ConfigError(f"a time limit is a positive number of seconds, or None; got {seconds!r}.")
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self._done, self._raising = threading.Event(), threading.Lock()
        self._done.set()

    @contextlib.contextmanager
    def enforce(self) -> Iterator[None]:
        """Raise TimeLimitError in the block once the time is over: between two instructions of Python, not in a call into C."""
        if self._end is None:
            yield
            return
        self._done.clear()
        wait = min(max(self._end - time.monotonic(), 0), threading.TIMEOUT_MAX)
        threading.Thread(target=self._watch, args=(threading.get_ident(), wait), name="regard-time-limit", daemon=True).start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Raise nothing from now on; of the thread that is limited."""
        while not self._done.is_set():
            with contextlib.suppress(TimeLimitError), self._raising:  # it may be raised here, where the block has just ended
                raise_in(threading.get_ident(), None)
                self._done.set()

    def _watch(self, thread: int, wait: float) -> None:
        while not self._done.wait(wait):
            with self._raising:
                if not self._done.is_set():
                    raise_in(thread, TimeLimitError)
            wait = AGAIN_SECONDS


UNLIMITED = TimeLimit(None)


def raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an error in a thread when it next runs Python; None takes back one that has not been raised yet."""
    given = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)
