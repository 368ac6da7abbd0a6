"""`python -m regard`, and the command `regard`: the command line, which Ctrl-C ends quietly from the first moment."""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT  # what a shell tells of a command that Ctrl-C ended


def main() -> int:
    """Runs a command, once PyTorch and all else it needs is imported: seconds in which there is nothing to put in order."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # where Ctrl-C is ignored, in the background say, it stays so
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from regard.cli import main as command

    signal.signal(signal.SIGINT, before)
    return command()


if __name__ == "__main__":
    raise SystemExit(main())
