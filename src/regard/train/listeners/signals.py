"""Signals: Ctrl-C and SIGTERM end a run after the current step, with a checkpoint; a second signal ends it at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from regard.train.report import Report
from regard.train.training import Training

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """A listener that stops a run after a signal was received."""

    def __init__(self) -> None:
        self.came: signal.Signals | None = None

    def __call__(self, training: Training, report: Report) -> None:
        if self.came is not None:
            training.stop(self.came.name)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Handle the signals within the context, and restore the former handlers after it."""
        before = {one: signal.signal(one, self.hear) for one in CAUGHT}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: store the first one, raise KeyboardInterrupt for the second."""
        if self.came is not None:
            raise KeyboardInterrupt
        self.came = signal.Signals(number)
