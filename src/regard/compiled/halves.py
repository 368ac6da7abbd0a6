# mypy: ignore-errors
"""Numbers in memory, float32 or bfloat16; numba has no bfloat16, so it is stored as uint16, the upper half of a float32."""

import numpy as np
from llvmlite import ir
from numba import types, uint16
from numba.core import cgutils
from numba.extending import intrinsic, overload

from regard.compiled.registers import LANES, SIZE, data, everywhere
from regard.compiled.vectors import as_float

WORD, SHORT, FLOAT = ir.IntType(32), ir.IntType(16), ir.FloatType()


# written in LLVM IR: numba would widen sums of 32 bits to 64, so that a register held half as many


@intrinsic
def rounded(context, x):
    """Round a float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    return types.uint16(types.float32), lambda context, builder, signature, arguments: nearest(builder, *arguments)


@intrinsic
def pair(context, first, second):
    """Pack two bfloat16 numbers into a uint32, the first in the lower half."""
    return types.uint32(types.uint16, types.uint16), lambda context, builder, signature, arguments: beside(builder, *arguments)


@intrinsic
def put_row(context, x, at, factor, out, to, count):
    """Set out[to + p] = x[at + p] factor for p below count, rounded if out is bfloat16.

    The arrays are contiguous. Bounds are not checked.
    """
    signature = types.void(x, types.intp, types.float32, out, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        x, at, factor, out, to, count = arguments
        x, out = data(context, builder, signature.args[0], x), data(context, builder, signature.args[3], out)

        def some(place, lanes):
            numbers = builder.fmul(load(builder, x, at, place, FLOAT, lanes), repeated(builder, factor, lanes))
            return numbers if signature.args[3].dtype == types.float32 else nearest(builder, numbers)

        strips(builder, count, out, to, some)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def pair_rows(context, x, at, y, other, out, to, count):
    """Set out[to + p] to the pair of x[at + p] and y[other + p] for p below count.

    The arrays are contiguous. Bounds are not checked.
    """
    signature = types.void(x, types.intp, y, types.intp, out, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        x, at, y, other, out, to, count = arguments
        x, y, out = (data(context, builder, signature.args[n], one) for n, one in ((0, x), (2, y), (4, out)))

        def some(place, lanes):
            return beside(builder, *(load(builder, one, start, place, SHORT, lanes) for one, start in ((x, at), (y, other))))

        strips(builder, count, out, to, some)
        return context.get_dummy_value()

    return signature, generate


def nearest(builder, x):
    """Round the bits of one or many float32 to their upper halves."""
    word, short = (like(x, kind) for kind in (WORD, SHORT))
    bits, upper = builder.bitcast(x, word), constant(word, 16)
    odd = builder.and_(builder.lshr(bits, upper), constant(word, 1))
    found = builder.lshr(builder.add(bits, builder.add(odd, constant(word, 0x7FFF))), upper)
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", x, x), constant(word, 0x7FC0), found), short)


def beside(builder, first, second):
    """Pack 16-bit numbers, one or many of each operand, into as many of 32 bits."""
    word = like(first, WORD)
    low, high = (builder.zext(one, word) for one in (first, second))
    return builder.or_(low, builder.shl(high, constant(word, 16)))


def strips(builder, count, out, to, some):
    """Store some(place, lanes) for each place, a register at a time, and the last numbers one by one."""
    whole = builder.and_(count, SIZE(-LANES))
    for start, stop, lanes in ((SIZE(0), whole, LANES), (whole, count, 1)):
        with cgutils.for_range_slice(builder, start, stop, SIZE(lanes)) as (place, _):
            found = some(place, lanes)
            here = builder.bitcast(builder.gep(out, [builder.add(to, place)]), found.type.as_pointer())
            builder.store(found, here, align=2)


def load(builder, x, at, place, kind, lanes):
    """Load one number, or `lanes` numbers."""
    kind = kind if lanes == 1 else ir.VectorType(kind, lanes)
    return builder.load(builder.bitcast(builder.gep(x, [builder.add(at, place)]), kind.as_pointer()), align=2)


def repeated(builder, x, lanes):
    """Repeat a number in each of `lanes` lanes."""
    return x if lanes == 1 else everywhere(builder, x)


def like(x, kind):
    """Return the type of as many numbers as x has."""
    return ir.VectorType(kind, x.type.count) if isinstance(x.type, ir.VectorType) else kind


def constant(kind, n):
    """Return a constant of a type, n in each lane."""
    return ir.Constant(kind, [n] * kind.count if isinstance(kind, ir.VectorType) else n)


def read(x):
    """Convert a number in memory to float32."""


def put(out, place, x):
    """Store x in out, rounded if out is bfloat16."""


@overload(read, inline="always")
def read_number(x):
    """Return the implementation that numba compiles for these types."""
    return (lambda x: as_float(np.int32(np.uint32(x) << np.uint32(16)))) if x == uint16 else (lambda x: x)


@overload(put, inline="always")
def put_number(out, place, x):
    """Return the implementation that numba compiles for these types."""

    def half(out, place, x):
        out[place] = rounded(x)

    def whole(out, place, x):
        out[place] = x

    return half if out.dtype == uint16 else whole
