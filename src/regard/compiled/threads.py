"""Run compiled functions on torch's OpenMP threads, to avoid oversubscription by a second pool."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from regard.compiled import processor

RUN, RUNS = 64, 4  # fewest rows of a matrix that a thread takes at a time, and how many times each takes some
FEW = 1  # vectors for which reading int8 rows takes longer than multiplying: these vectors are not quantized
START, MEET = "GOMP_parallel", "GOMP_barrier"  # symbols of OpenMP, in any implementation torch is built with


@cache
def started() -> Any:
    """Return OpenMP's function that runs another on several threads: (function, argument, threads, 0).

    None if torch was built without it.
    """
    start = found(START)
    if start is not None:
        start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return start


@cache
def meeting() -> int:
    """Return the address of OpenMP's barrier; 0 if torch was built without it."""
    wait = found(MEET)
    return 0 if wait is None else ctypes.cast(wait, ctypes.c_void_p).value or 0


def found(name: str) -> Any:
    """Look up a function in the libraries that torch is linked to; None if there is none."""
    try:
        return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
        return None


@cache
def usable() -> bool:
    """Return whether compiled loops can run on torch's threads: numba is installed, and torch's OpenMP was found."""
    return started() is not None and processor.has_numba()


def run(work: Any, said: Sequence[int], threads: int) -> None:
    """Run a compiled callback on `threads` of torch's threads, each given the address of the same numbers."""
    numbers = (ctypes.c_int64 * len(said))(*said)
    started()(work.address, ctypes.addressof(numbers), threads, 0)
