"""Run compiled functions on several threads: callbacks on torch's OpenMP threads, all others on threads of Python.

A second pool would compete with torch's for the cores, so callbacks use torch's own.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.compiled import processor

LEAST_ROWS = 64  # fewest rows of a matrix that a thread takes at a time
BLOCKS_PER_THREAD = 4  # how many times each thread takes some
PARALLEL, BARRIER = "GOMP_parallel", "GOMP_barrier"  # symbols of OpenMP, in any implementation torch is built with


class Arguments(ctypes.Structure):
    """Base of the arguments of a callback, which Python fills and compiled code reads. A field that is not set is 0."""

    __slots__ = ()


def integer_fields(names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    """Return fields of these names: sizes, strides, and addresses of arrays, 0 for none."""
    return [(name, ctypes.c_int64) for name in names.split()]


@cache
def find_parallel_call() -> Any:
    """Return OpenMP's function that runs another on several threads: (function, argument, threads, 0).

    None if torch was built without it.
    """
    start = find_torch_symbol(PARALLEL)
    if start is not None:
        start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return start


@cache
def find_barrier_address() -> int:
    """Return the address of OpenMP's barrier; 0 if torch was built without it."""
    wait = find_torch_symbol(BARRIER)
    return 0 if wait is None else ctypes.cast(wait, ctypes.c_void_p).value or 0


def find_torch_symbol(name: str) -> Any:
    """Look up a function in the libraries that torch is linked to; None if there is none."""
    try:
        return getattr(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")), name)
    except (OSError, AttributeError):
        return None


@cache
def can_run_loops() -> bool:
    """Return whether compiled loops can run on torch's threads: numba is installed, and torch's OpenMP was found."""
    return find_parallel_call() is not None and processor.has_numba()


def run_callback(work: Any, count: int, /, **arguments: Tensor | float | ctypes.Array[ctypes.c_int64] | None) -> Any:
    """Run a compiled callback on `count` of torch's threads, each given the address of the same arguments; return these.

    The arguments are the fields of the callback's structure by name: a tensor is passed as its address, None as 0.
    """
    values = {
        name: value.data_ptr() if isinstance(value, Tensor) else 0 if value is None else value
        for name, value in arguments.items()
    }
    structure = work.arguments(**values)
    find_parallel_call()(work.address, ctypes.addressof(structure), count, 0)
    return structure


def run_parts(work: Callable[[int], None], parts: int) -> None:
    """Run work(0) to work(parts - 1), functions that release the GIL, each in a thread of Python.

    For work that no single structure of numbers describes. It starts more slowly than a callback, see docs/benchmarks.md.
    """
    if parts == 1:
        return work(0)
    with ThreadPoolExecutor(parts - 1) as others:
        waiting = [others.submit(work, part) for part in range(1, parts)]
        work(0)
        for one in waiting:
            one.result()
    return None
