"""Counts of the Python that a piece of code runs, taken in a process of its own, which no other test has changed."""

import subprocess
import sys

PROGRAM = """
import sys
count, kinds = 0, {kinds!r}

def see(frame, event, argument):
    global count
    count += event in kinds
    return see

{setup}
sys.{trace}(see)
{work}
sys.{trace}(None)
print(count)
"""


def count_calls(setup: str, work: str) -> int:
    """How many functions are called by `work`, those written in C too."""
    return count_events(setup, work, "setprofile", ("call", "c_call"))


def count_lines(setup: str, work: str) -> int:
    """How many lines of Python `work` runs, those of the functions it calls."""
    return count_events(setup, work, "settrace", ("line",))


def count_events(setup: str, work: str, trace: str, kinds: tuple[str, ...]) -> int:
    program = PROGRAM.format(setup=setup, work=work, trace=trace, kinds=kinds)
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
