"""Texts that are being written, by a name that the client chooses, so that another request can stop one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class NamedRuns:
    """The runs that can be stopped; several threads may use it at once."""

    def __init__(self) -> None:
        self._stops: dict[str, threading.Event] = {}

    @contextmanager
    def open(self, name: str | None) -> Iterator[threading.Event]:
        """Return the stop of a run in a context, in which `stop` finds it by its name."""
        event = threading.Event()
        if name is not None:
            self._stops[name] = event
        try:
            yield event
        finally:
            self.close(event)

    def close(self, event: threading.Event) -> None:
        """Remove a run, whose words are all written, so that `stop` does not find it any more."""
        for name, other in list(self._stops.items()):
            if other is event:
                self._stops.pop(name, None)

    def stop(self, name: str) -> bool:
        """Set the stop of a run; return whether there is one of this name."""
        event = self._stops.get(name)
        if event is not None:
            event.set()
        return event is not None
