# mypy: ignore-errors
"""The exponentials of a row of scores and their sum, in one pass over the row, written in LLVM IR.

Each pass of its own, for the scale, the exponential and the rounding to bfloat16, would load and store the row again.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.bfloat16 import emit_bfloat16_bits, emit_strip_loop, make_constant, repeat_number
from regard.compiled.register_tiles import (
    COLUMNS,
    LANES,
    MULTIPLIES_PAIRS,
    SIZE,
    VECTOR,
    VECTORS,
    BFloat16Type,
    broadcast_lanes,
    emit_multiply_add,
    get_data_pointer,
    get_vector_pointer,
)
from regard.compiled.vectors import C0, C1, C2, C3, C4, C5, LOG2E, LOWEST

ROUNDER = 1.5 * 2**23 + 127  # a sum with it is rounded to an integer
INTS, SHORTS = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), LANES)


@intrinsic
def fill_numbers(context, out, at, count, number):
    """Set out[at + p] = number for p below count, of a contiguous array of float32. Bounds are not checked."""
    signature = types.void(out, types.intp, types.intp, types.float32)

    def generate(context, builder, signature, arguments):
        out, at, count, number = arguments
        data = get_data_pointer(context, builder, signature.args[0], out)
        emit_strip_loop(builder, count, data, at, lambda place, lanes: repeat_number(builder, number, lanes))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def store_exponentials(context, scores, at, count, scale, top, out, to):
    """Set out[to + p] = exp((scores[at + p] - top) scale) for p below count, a multiple of COLUMNS; return the sum.

    No score is above top, so that no difference is above 0, however large the scores are. Exponentials of those below LOWEST
    are 0. out may be scores, or hold bfloat16 numbers: they are rounded after they are summed. The arrays are contiguous.
    Bounds are not checked.
    """
    signature = types.float32(scores, types.intp, types.intp, types.float32, types.float32, out, types.intp)

    def generate(context, builder, signature, arguments):
        scores, at, count, scale, top, out, to = arguments
        scores, out = (get_data_pointer(context, builder, signature.args[n], x) for n, x in ((0, scores), (5, out)))
        scale, top = broadcast_lanes(builder, scale), broadcast_lanes(builder, top)
        totals = [cgutils.alloca_once_value(builder, make_constant(VECTOR, 0.0)) for _ in range(VECTORS)]
        with cgutils.for_range_slice(builder, SIZE(0), count, SIZE(COLUMNS)) as (place, _):
            for c, total in enumerate(totals):
                score = builder.load(get_vector_pointer(builder, scores, builder.add(at, place), c), align=4)
                found = emit_exponential(builder, builder.fmul(builder.fsub(score, top), scale))
                builder.store(builder.fadd(builder.load(total), found), total)
                found = found if signature.args[5].dtype == types.float32 else emit_bfloat16_rounding(builder, found)
                here = builder.gep(out, [builder.add(builder.add(to, place), SIZE(c * LANES))])
                builder.store(found, builder.bitcast(here, found.type.as_pointer()), align=2)
        total = builder.fadd(*(builder.load(total) for total in totals)) if VECTORS == 2 else builder.load(totals[0])
        reduce = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.FloatType(), [ir.FloatType(), VECTOR]), f"llvm.vector.reduce.fadd.v{LANES}f32"
        )
        return builder.call(reduce, [ir.Constant(ir.FloatType(), 0.0), total], fastmath=["reassoc"])

    return signature, generate


def emit_exponential(builder, z):
    """Emit exp(z) by the polynomial of `vectors`, 0 below LOWEST; NaN stays NaN.

    No number is converted to an integer, which LLVM defines for finite ones only: after the sum with ROUNDER, the lowest bits
    are those of n + 127, the exponent of 2ⁿ. Not for functions that may reassociate sums, which would drop ROUNDER.
    """
    rounder, y = make_constant(VECTOR, ROUNDER), builder.fmul(z, make_constant(VECTOR, float(LOG2E)))
    rounded = builder.fadd(y, rounder)
    f = builder.fsub(y, builder.fsub(rounded, rounder))  # y - n, exactly
    power = make_constant(VECTOR, float(C5))
    for c in (C4, C3, C2, C1, C0):
        power = emit_multiply_add(builder, make_constant(VECTOR, float(c)), power, f)
    factor = builder.bitcast(builder.shl(builder.bitcast(rounded, INTS), make_constant(INTS, 23)), VECTOR)
    is_small = builder.fcmp_ordered("<", z, make_constant(VECTOR, float(LOWEST)))
    return builder.select(is_small, make_constant(VECTOR, 0.0), builder.fmul(power, factor))


def emit_bfloat16_rounding(builder, x):
    """Emit the bfloat16 numbers nearest to a register of numbers."""
    if not MULTIPLIES_PAIRS:
        return emit_bfloat16_bits(builder, x)
    kind = ir.FunctionType(ir.VectorType(BFloat16Type(), LANES), [VECTOR])
    rounded = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    return builder.bitcast(builder.call(rounded, [x]), SHORTS)
