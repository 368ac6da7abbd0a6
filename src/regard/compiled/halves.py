# mypy: ignore-errors
"""Numbers in memory, float32 or bfloat16, which numba knows as uint16: the upper half of a float32."""

import numpy as np
from llvmlite import ir
from numba import types, uint16
from numba.extending import intrinsic, overload

from regard.compiled.vectors import as_float

NAN = np.uint16(0x7FC0)


@intrinsic
def bits(context, x):
    """The 32 bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def read(x):
    """The float32 of a number in memory."""


def put(out, place, x):
    """x in memory: in bfloat16 the nearest there is, of two the even one; a NaN stays one."""


@overload(read, inline="always")
def read_number(x):
    """What numba compiles of it."""
    return (lambda x: as_float(np.int32(np.uint32(x) << np.uint32(16)))) if x == uint16 else (lambda x: x)


@overload(put, inline="always")
def put_number(out, place, x):
    """What numba compiles of it."""

    def rounded(out, place, x):
        b = bits(x)
        b = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[place] = np.uint16(b) if x == x else NAN

    def whole(out, place, x):
        out[place] = x

    return rounded if out.dtype == uint16 else whole
