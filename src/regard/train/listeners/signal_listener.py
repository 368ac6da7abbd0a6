"""Signals: Ctrl-C and SIGTERM end a run after the current step, with a checkpoint; a second signal ends it at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from regard.train.training_state import Report, Training

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SignalListener:
    """A listener that stops a run after a signal was received."""

    def __init__(self) -> None:
        self.came: signal.Signals | None = None

    def __call__(self, training: Training, report: Report) -> None:
        if self.came is not None:
            training.stop(self.came.name)

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Handle the signals within the context, and restore the former handlers after it."""
        handlers = {one: signal.signal(one, self.handle_signal) for one in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for one, handler in handlers.items():
                signal.signal(one, handler)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: store the first one, raise KeyboardInterrupt for the second."""
        if self.came is not None:
            raise KeyboardInterrupt
        self.came = signal.Signals(number)
