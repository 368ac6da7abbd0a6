"""Findings that state why an examination ended early: the subject ended it, or the time was over."""

import contextlib
import re
import signal
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from regard.examination.report import Finding

OWN = ("<", str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
STANDARD, INSTALLED = sysconfig.get_path("stdlib"), sysconfig.get_path("platlib")
DUMPED = re.compile(r'File "(.+)", line (\d+) in ')  # as faulthandler writes a frame, the innermost first
RAISE = "Raise a subclass of Exception, such as ValueError; anything else ends the program that calls the subject."
RETURN = "A layer must return or raise: remove calls that end the process (sys.exit, os._exit), and fix crashes."
FASTER = "Pass a shorter sample, or a longer time limit; or fix what does not end."


def report_exception(error: BaseException, step: str) -> Finding:
    """Return the finding of a subject that raised something other than an Exception, such as SystemExit."""
    message = " ".join(str(error).split())
    cure = RETURN if isinstance(error, SystemExit) else RAISE
    evidence = f"it raised {type(error).__name__}{f': {message}' if message else ''}{locate_error(error)}{locate_step(step)}"
    return Finding("raises", evidence, cure, 3.0, "stopped")


def report_timeout(seconds: float, step: str, where: str = "") -> Finding:
    """Return the finding of an examination that reached its time limit."""
    return Finding(
        "unfinished", f"the time limit of {seconds:g} s was reached{where}{locate_step(step)}", FASTER, 3.0, "stopped"
    )


def report_process_end(status: int, step: str) -> Finding:
    """Return the finding of a subject that ended the process in which it ran, with an exit status or by a signal."""
    how = f"ended with exit status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):
            how = f"was ended by {signal.Signals(-status).name}"
    return Finding("unfinished", f"the process in which it ran {how}{locate_step(step)}", RETURN, 3.0, "stopped")


def locate_step(step: str) -> str:
    """Return the words for the step that was examined."""
    return f", while examining its {step}" if step else ""


def locate_error(error: BaseException) -> str:
    """Return the line of the subject's code that an error comes from, as the end of a clause; "" if none of it ran."""
    frames = traceback.extract_tb(error.__traceback__)
    return locate_first_frame((one.filename, one.lineno) for one in reversed(frames))


def locate_in_dump(dump: str) -> str:
    """Return the line of the subject's code in a dump of faulthandler, in the main thread, as the end of a clause."""
    return locate_first_frame(DUMPED.findall(dump.rpartition("hread 0x")[2]))


def locate_first_frame(frames: Iterable[tuple[str, object]]) -> str:
    """Return the first frame, innermost first, outside of torch, regard and Python's own modules, as the end of a clause."""
    for name, line in frames:
        if not name.startswith(OWN) and (name.startswith(INSTALLED) or not name.startswith(STANDARD)):
            return f" in line {line} of {Path(name).name}"
    return ""


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether an error was raised by a signal handler, and so is not the subject's."""
    handlers = {getattr(signal.getsignal(one), "__code__", None) for one in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))
