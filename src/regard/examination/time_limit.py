"""A time limit: raises an exception in the thread of an examination once the time is over."""

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Iterator

from regard.errors import ConfigError
from regard.mechanism.arguments import check_number

AGAIN_SECONDS = 1.0  # until the error is raised again, if the subject caught it


class TimeLimitError(BaseException):
    """Raised when the time is over; not an Exception, so that code that catches what a subject raises does not catch it."""


class TimeLimit:
    """A limit of some seconds from now, None for no limit. Raises ConfigError unless seconds is None or a positive number."""

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None and not 0 < check_number("a time limit", seconds, " of seconds, or None") < math.inf:
            raise ConfigError(f"a time limit is a positive number of seconds, or None; got {seconds!r}.")
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self._done, self._raising = threading.Event(), threading.Lock()
        self._has_raised = False
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
        """End the limit: nothing is raised after this call. Must be called in the thread that is limited.

        An error that was sent and has not been raised yet is not withdrawn, which would leave CPython checking for one at
        every instruction (a trace function then never returns): it is replaced by another, which is caught here.
        """
        is_replaced = False
        while True:
            try:
                with self._raising:
                    self._done.set()
                if not self._has_raised:
                    return
                is_replaced = True
                raise_in_thread(threading.get_ident())
                while True:
                    pass
            except TimeLimitError:
                if is_replaced:
                    self._has_raised = False
                    return

    def _watch(self, thread: int, wait: float) -> None:
        while not self._done.wait(wait):
            with self._raising:
                if not self._done.is_set():
                    self._has_raised = True
                    raise_in_thread(thread)
            wait = AGAIN_SECONDS


UNLIMITED = TimeLimit(None)


def raise_in_thread(thread: int) -> None:
    """Raise TimeLimitError in a thread when it next runs Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitError))
