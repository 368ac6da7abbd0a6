"""The threads that torch computes with, for work of ours: others, awake at the same time, would stand in their way."""

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

START = "GOMP_parallel"  # of OpenMP, whichever torch was built with


@cache
def started() -> Any:
    """OpenMP's call that runs a function on several threads: (function, argument, threads, 0); None where torch has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        start: Any = getattr(ctypes.CDLL(str(library)), START)  # found in what torch is linked to
    except (OSError, AttributeError):
        return None
    start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return start


@cache
def usable() -> bool:
    """Whether compiled loops can run on them: numba is installed, and torch's threads can be had."""
    return started() is not None and importlib.util.find_spec("numba") is not None


def run(work: Any, said: Sequence[int], threads: int) -> None:
    """Runs a compiled callback on so many of torch's threads, each given the address of the same numbers."""
    numbers = (ctypes.c_int64 * len(said))(*said)
    started()(work.address, ctypes.addressof(numbers), threads, 0)
