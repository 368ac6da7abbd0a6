"""The command line, `python -m regard` and the command `regard`; Ctrl-C ends it without a traceback from the start."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from regard.terminal_escapes import LINES, escape_controls

LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it when it is imported: ask Linux for pages of 2 MB for large tensors
READS_ALL_WEIGHTS = ("generate", "serve")  # commands that do so for each token, faster from large pages
INTERRUPTED = 128 + signal.SIGINT  # the exit status that a shell gives a command ended by Ctrl-C


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Return a context manager in which Ctrl-C ends the process at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # if Ctrl-C is ignored, as in the background, it stays ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def restart_in_utf8() -> None:
    """Restart Python in UTF-8 mode where neither the locale nor PYTHONUTF8 lets it read other words than English ones."""
    if sys.getfilesystemencoding() == "ascii" and not sys.flags.utf8_mode:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def main() -> int:
    """Run a command; Ctrl-C during its imports, which take seconds and need no cleanup, ends the process at once."""
    restart_in_utf8()
    if any(name in READS_ALL_WEIGHTS for name in sys.argv[1:2]):
        os.environ.setdefault(LARGE_PAGES, "1")
    try:
        with exit_on_interrupt():
            from regard.cli import main as command
        return command(importing=exit_on_interrupt())
    except MemoryError:
        name = " ".join(("regard", *sys.argv[1:2]))
        sys.stderr.write(f"{name}: no memory is left: end other programs, or raise the limit of this one (ulimit -v).\n")
        return 2
    except Exception:  # a bug in regard
        import traceback

        with suppress(OSError):
            sys.stderr.write(escape_controls(traceback.format_exc(), LINES))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
