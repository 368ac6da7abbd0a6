"""`python -m regard`, and the command `regard`: the command line, which Ctrl-C ends quietly from the first moment."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from regard.printable import LINES, escape_controls

INTERRUPTED = 128 + signal.SIGINT  # what a shell tells of a command that Ctrl-C ended


@contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """A context in which Ctrl-C ends the process at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # where Ctrl-C is ignored, in the background say, it stays so
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    """Run a command, once PyTorch and all else it needs is imported: seconds in which there is nothing to put in order."""
    with ending_at_interrupt():
        from regard.cli import main as command
    try:
        return command(importing=ending_at_interrupt())
    except Exception:  # a mistake of regard's own
        with suppress(OSError):
            sys.stderr.write(escape_controls(traceback.format_exc(), LINES))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
