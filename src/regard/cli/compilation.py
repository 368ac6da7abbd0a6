"""A line at the terminal while loops are compiled, which takes seconds when a machine does it for the first time."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("regard.compiled")


class Notice(logging.Handler):
    """Print the first of the messages to stderr."""

    def __init__(self, command: str) -> None:
        super().__init__(logging.INFO)
        self.command, self.is_printed = command, False

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, unless one was."""
        if not self.is_printed:
            self.is_printed = True
            print(f"regard {self.command}: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def print_compilation(command: str) -> Iterator[None]:
    """A context in which a terminal is told once that loops are compiled; a pipe is told nothing."""
    if not sys.stderr.isatty():
        yield
        return
    notice, level = Notice(command), LOGGER.level
    LOGGER.addHandler(notice)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(notice)
        LOGGER.setLevel(level)
