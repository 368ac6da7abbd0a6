"""The threads that torch computes with, for work of ours: others, awake at the same time, would stand in their way."""

import ctypes
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
