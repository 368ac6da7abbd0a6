"""Signals: Ctrl-C and SIGTERM end a run after the step it is in, with a checkpoint; a second one ends it at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from regard.train.report import Report
from regard.train.training import Training

CAUGHT = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """A listener that stops a run where a signal came."""

    def __init__(self) -> None:
        self.came: signal.Signals | None = None

    def __call__(self, training: Training, report: Report) -> None:
        if self.came is not None:
            training.stop(self.came.name)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A context in which the signals come here; the handlers there were are put back."""
        before = {one: signal.signal(one, self.hear) for one in CAUGHT}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """A signal: the first is remembered, the second is Ctrl-C."""
        if self.came is not None:
            raise KeyboardInterrupt
        self.came = signal.Signals(number)
