# mypy: ignore-errors
"""Numbers in memory, float32 or bfloat16; numba has no bfloat16, so it is stored as uint16, the upper half of a float32."""

import numpy as np
from llvmlite import ir
from numba import types, uint16
from numba.core import cgutils
from numba.extending import intrinsic, overload

from regard.compiled.register_tiles import LANES, SIZE, broadcast_lanes, get_data_pointer
from regard.compiled.vectors import reinterpret_as_float32

WORD, SHORT, FLOAT = ir.IntType(32), ir.IntType(16), ir.FloatType()


# written in LLVM IR: numba would widen sums of 32 bits to 64, so that a register held half as many


@intrinsic
def round_to_bfloat16(context, x):
    """Round a float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    return types.uint16(types.float32), lambda context, builder, signature, arguments: emit_bfloat16_bits(builder, *arguments)


@intrinsic
def pack_pair(context, first, second):
    """Pack two bfloat16 numbers into a uint32, the first in the lower half."""
    return types.uint32(types.uint16, types.uint16), lambda context, builder, signature, arguments: emit_packed_bits(
        builder, *arguments
    )


@intrinsic
def store_scaled_row(context, x, at, factor, out, to, count):
    """Set out[to + p] = x[at + p] factor for p below count, rounded if out is bfloat16.

    The arrays are contiguous. Bounds are not checked.
    """
    signature = types.void(x, types.intp, types.float32, out, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        x, at, factor, out, to, count = arguments
        x, out = (
            get_data_pointer(context, builder, signature.args[0], x),
            get_data_pointer(context, builder, signature.args[3], out),
        )

        def emit_scaled_numbers(place, lanes):
            numbers = builder.fmul(emit_load(builder, x, at, place, FLOAT, lanes), repeat_number(builder, factor, lanes))
            return numbers if signature.args[3].dtype == types.float32 else emit_bfloat16_bits(builder, numbers)

        emit_strip_loop(builder, count, out, to, emit_scaled_numbers)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def pack_row_pairs(context, x, at, y, other, out, to, count):
    """Set out[to + p] to the pair of x[at + p] and y[other + p] for p below count.

    The arrays are contiguous. Bounds are not checked.
    """
    signature = types.void(x, types.intp, y, types.intp, out, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        x, at, y, other, out, to, count = arguments
        x, y, out = (get_data_pointer(context, builder, signature.args[n], one) for n, one in ((0, x), (2, y), (4, out)))

        def emit_packed_pairs(place, lanes):
            return emit_packed_bits(
                builder, *(emit_load(builder, one, start, place, SHORT, lanes) for one, start in ((x, at), (y, other)))
            )

        emit_strip_loop(builder, count, out, to, emit_packed_pairs)
        return context.get_dummy_value()

    return signature, generate


def emit_bfloat16_bits(builder, x):
    """Round the bits of one or many float32 to their upper halves."""
    word, short = (get_matching_type(x, kind) for kind in (WORD, SHORT))
    bits, upper = builder.bitcast(x, word), make_constant(word, 16)
    odd = builder.and_(builder.lshr(bits, upper), make_constant(word, 1))
    found = builder.lshr(builder.add(bits, builder.add(odd, make_constant(word, 0x7FFF))), upper)
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", x, x), make_constant(word, 0x7FC0), found), short)


def emit_packed_bits(builder, first, second):
    """Pack 16-bit numbers, one or many of each operand, into as many of 32 bits."""
    word = get_matching_type(first, WORD)
    low, high = (builder.zext(one, word) for one in (first, second))
    return builder.or_(low, builder.shl(high, make_constant(word, 16)))


def emit_strip_loop(builder, count, out, to, some):
    """Store some(place, lanes) for each place, a register at a time, and the last numbers one by one."""
    whole = builder.and_(count, SIZE(-LANES))
    for start, stop, lanes in ((SIZE(0), whole, LANES), (whole, count, 1)):
        with cgutils.for_range_slice(builder, start, stop, SIZE(lanes)) as (place, _):
            found = some(place, lanes)
            here = builder.bitcast(builder.gep(out, [builder.add(to, place)]), found.type.as_pointer())
            builder.store(found, here, align=2)


def emit_load(builder, x, at, place, kind, lanes):
    """Load one number, or `lanes` numbers."""
    kind = kind if lanes == 1 else ir.VectorType(kind, lanes)
    return builder.load(builder.bitcast(builder.gep(x, [builder.add(at, place)]), kind.as_pointer()), align=2)


def repeat_number(builder, x, lanes):
    """Repeat a number in each of `lanes` lanes."""
    return x if lanes == 1 else broadcast_lanes(builder, x)


def get_matching_type(x, kind):
    """Return the type of as many numbers as x has."""
    return ir.VectorType(kind, x.type.count) if isinstance(x.type, ir.VectorType) else kind


def make_constant(kind, n):
    """Return a constant of a type, n in each lane."""
    return ir.Constant(kind, [n] * kind.count if isinstance(kind, ir.VectorType) else n)


def convert_to_float32(x):
    """Convert a number in memory to float32."""


def store_number(out, place, x):
    """Store x in out, rounded if out is bfloat16."""


@overload(convert_to_float32, inline="always")
def overload_convert_to_float32(x):
    """Return the implementation that numba compiles for these types."""
    return (lambda x: reinterpret_as_float32(np.int32(np.uint32(x) << np.uint32(16)))) if x == uint16 else (lambda x: x)


@overload(store_number, inline="always")
def overload_store_number(out, place, x):
    """Return the implementation that numba compiles for these types."""

    def store_bfloat16(out, place, x):
        out[place] = round_to_bfloat16(x)

    def store_float32(out, place, x):
        out[place] = x

    return store_bfloat16 if out.dtype == uint16 else store_float32
