"""A line at the terminal while loops are compiled, which takes seconds the first time on a machine."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("regard.compiled")


class Notice(logging.Handler):
    """A logging handler that prints the first message to stderr."""

    def __init__(self, command: str) -> None:
        super().__init__(logging.INFO)
        self.command, self.is_printed = command, False

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, unless one was printed before."""
        if not self.is_printed:
            self.is_printed = True
            print(f"regard {self.command}: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def print_compilation(command: str) -> Iterator[None]:
    """Print once within the context that loops are compiled, if stderr is a terminal."""
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
