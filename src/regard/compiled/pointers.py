# mypy: ignore-errors
"""What a function that torch's threads run is handed, and what it takes from the others: one address, and numbers there."""

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def take(context, place):
    """The next run that no thread has taken: the number at this address, which is one more from then on."""

    def generate(context, builder, signature, arguments):
        at = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.voidptr), generate


@intrinsic
def at(context, address):
    """What lies at an address."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def meet(context, address):
    """Waits for the other threads: OpenMP's barrier, at this address."""

    def generate(context, builder, signature, arguments):
        wait = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), []).as_pointer())
        builder.call(wait, [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def fetch(context, address):
    """Asks for the cache line at an address, and does not wait for it."""

    def generate(context, builder, signature, arguments):
        ask(builder, builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


def ask(builder, place):
    """The same in LLVM's language, for the line that a pointer points into."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.bitcast(place, byte), word(0), word(3), word(1)])


@njit
def floats(address, count):
    """So many numbers at an address, none where it is 0."""
    return carray(at(address), (count if address else 0,), np.float32)
