# mypy: ignore-errors
"""Numbers in memory, float32 or bfloat16, which numba knows as uint16: the upper half of a float32."""

import numpy as np
from llvmlite import ir
from numba import types, uint16
from numba.core import cgutils
from numba.extending import intrinsic, overload

from regard.compiled.registers import LANES, SIZE, data, everywhere
from regard.compiled.vectors import as_float

WORD, SHORT, FLOAT = ir.IntType(32), ir.IntType(16), ir.FloatType()


# said in LLVM's language: numba would widen 32 bits to 64 for any sum of them, and halve what a register holds


@intrinsic
def rounded(context, x):
    """The bfloat16 nearest to a float32, of two the even one; a NaN stays one."""
    return types.uint16(types.float32), lambda context, builder, signature, arguments: nearest(builder, *arguments)


@intrinsic
def pair(context, first, second):
    """Two numbers of bfloat16 side by side, the first in the lower half."""
    return types.uint32(types.uint16, types.uint16), lambda context, builder, signature, arguments: beside(builder, *arguments)


@intrinsic
def put_row(context, x, at, factor, out, to, count):
    """out[to + p] = x[at + p] factor, p below count, rounded where out is bfloat16; contiguous arrays. Nothing is checked."""
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
    """out[to + p] = the pair of x[at + p] and y[other + p], p below count; of contiguous arrays. Nothing is checked."""
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
    """The upper halves of the bits of one float32 or many, rounded."""
    word, short = (like(x, kind) for kind in (WORD, SHORT))
    bits, upper = builder.bitcast(x, word), constant(word, 16)
    odd = builder.and_(builder.lshr(bits, upper), constant(word, 1))
    found = builder.lshr(builder.add(bits, builder.add(odd, constant(word, 0x7FFF))), upper)
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", x, x), constant(word, 0x7FC0), found), short)


def beside(builder, first, second):
    """Two numbers of 16 bits, or many, as one of 32 each."""
    word = like(first, WORD)
    low, high = (builder.zext(one, word) for one in (first, second))
    return builder.or_(low, builder.shl(high, constant(word, 16)))


def strips(builder, count, out, to, some):
    """Writes a register's worth of numbers at a time, and the last ones one by one; some(place, lanes) makes them."""
    whole = builder.and_(count, SIZE(-LANES))
    for start, stop, lanes in ((SIZE(0), whole, LANES), (whole, count, 1)):
        with cgutils.for_range_slice(builder, start, stop, SIZE(lanes)) as (place, _):
            found = some(place, lanes)
            here = builder.bitcast(builder.gep(out, [builder.add(to, place)]), found.type.as_pointer())
            builder.store(found, here, align=2)


def load(builder, x, at, place, kind, lanes):
    """One number, or as many as lanes."""
    kind = kind if lanes == 1 else ir.VectorType(kind, lanes)
    return builder.load(builder.bitcast(builder.gep(x, [builder.add(at, place)]), kind.as_pointer()), align=2)


def repeated(builder, x, lanes):
    """A number in each of so many lanes."""
    return x if lanes == 1 else everywhere(builder, x)


def like(x, kind):
    """A type of as many numbers as x is."""
    return ir.VectorType(kind, x.type.count) if isinstance(x.type, ir.VectorType) else kind


def constant(kind, n):
    """A number, as often as a type has it."""
    return ir.Constant(kind, [n] * kind.count if isinstance(kind, ir.VectorType) else n)


def read(x):
    """The float32 of a number in memory."""


def put(out, place, x):
    """x in memory, rounded where that is bfloat16."""


@overload(read, inline="always")
def read_number(x):
    """What numba compiles of it."""
    return (lambda x: as_float(np.int32(np.uint32(x) << np.uint32(16)))) if x == uint16 else (lambda x: x)


@overload(put, inline="always")
def put_number(out, place, x):
    """What numba compiles of it."""

    def half(out, place, x):
        out[place] = rounded(x)

    def whole(out, place, x):
        out[place] = x

    return half if out.dtype == uint16 else whole
