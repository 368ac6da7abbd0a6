"""The threads that torch computes with, for work of ours: others, awake at the same time, would stand in their way."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.compiled import processor

RUN, RUNS = 64, 4  # the fewest rows of a matrix that a thread takes at a time, and how often each takes some
FEW = 1  # vectors that the memory is slower than: bytes meet them as they are
START, MEET = "GOMP_parallel", "GOMP_barrier"  # of OpenMP, whichever torch was built with


@cache
def started() -> Any:
    """OpenMP's call that runs a function on several threads: (function, argument, threads, 0); None where torch has none."""
    start = found(START)
    if start is not None:
        start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return start


@cache
def meeting() -> int:
    """The address of OpenMP's call in which the threads it started wait for one another; 0 where torch has none."""
    wait = found(MEET)
    return 0 if wait is None else ctypes.cast(wait, ctypes.c_void_p).value or 0


def found(name: str) -> Any:
    """A function of what torch is linked to; None where there is none."""
    try:
        return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
        return None


@cache
def usable() -> bool:
    """Whether compiled loops can run on them: numba is installed, and torch's threads can be had."""
    return started() is not None and processor.has_numba()


def run(work: Any, said: Sequence[int], threads: int) -> None:
    """Runs a compiled callback on so many of torch's threads, each given the address of the same numbers."""
    numbers = (ctypes.c_int64 * len(said))(*said)
    started()(work.address, ctypes.addressof(numbers), threads, 0)
