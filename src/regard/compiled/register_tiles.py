# mypy: ignore-errors
"""A matrix product small enough for the processor's registers, from which the compiled loops build larger ones.

Loops in Python, compiled by numba, would leave the sums in memory; in LLVM IR each group of sums is a register.
"""

import functools
import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled import kernel_choice

LANES = kernel_choice.count_float32_lanes()  # float32 numbers in a register
VECTORS = 2  # registers in a row of a tile
ROWS = kernel_choice.choose_tile_rows()  # rows of a tile
COLUMNS = VECTORS * LANES
SIZE, VECTOR = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)
PAIRS = ir.VectorType(ir.IntType(32), LANES)  # two numbers of bfloat16 in each lane
MULTIPLIES_PAIRS = kernel_choice.has_bfloat16_products()


class BFloat16Type(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self):
        return "bfloat"


BFLOAT16_PAIRS = ir.VectorType(BFloat16Type(), 2 * LANES)


@intrinsic
def multiply_tile(context, a, at, row, step, b, start, depth, out, place, stride):
    """Set ROWS x COLUMNS numbers of out to a b, of contiguous arrays, from an offset on in each. Bounds are not checked.

    a[r, p] is at + r row + p step; b[p, c] is start + p COLUMNS + c; out[r, c] is place + r stride + c; p is below depth.
    If a and b are uint32, each element holds two bfloat16 numbers, and p counts pairs.
    """
    return make_tile_intrinsic(a, b, out, onto=False)


@intrinsic
def accumulate_tile(context, a, at, row, step, b, start, depth, out, place, stride):
    """Add a b to ROWS x COLUMNS numbers of out, with the layout of `multiply_tile`."""
    return make_tile_intrinsic(a, b, out, onto=True)


def make_tile_intrinsic(a, b, out, onto):
    """Return an intrinsic's signature and code generator, for a tile that is added to out or replaces it."""
    signature = types.void(a, types.intp, types.intp, types.intp, b, types.intp, types.intp, out, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        a, at, row, step, b, start, depth, out, place, stride = arguments
        kinds = (signature.args[0], signature.args[4], signature.args[7])
        a, b, out = (get_data_pointer(context, builder, kind, x) for kind, x in zip(kinds, (a, b, out), strict=True))
        vectors = [(r, c) for r in range(ROWS) for c in range(VECTORS)]
        places = [get_vector_pointer(builder, out, builder.add(place, builder.mul(stride, SIZE(r))), c) for r, c in vectors]
        kind, dot = (PAIRS, emit_pair_multiply_add) if signature.args[0].dtype == types.uint32 else (VECTOR, emit_multiply_add)
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in vectors]
        for total, here in zip(sums, places, strict=True):
            builder.store(builder.load(here, align=4) if onto else ir.Constant(VECTOR, [0.0] * LANES), total)
        with cgutils.for_range(builder, depth) as loop:
            panel = builder.add(start, builder.mul(loop.index, SIZE(COLUMNS)))
            right = [builder.load(get_vector_pointer(builder, b, panel, c, kind), align=4) for c in range(VECTORS)]
            first = builder.add(at, builder.mul(loop.index, step))
            starts = [builder.add(first, builder.mul(row, SIZE(r))) for r in range(ROWS)]
            left = [broadcast_lanes(builder, builder.load(builder.gep(a, [one]))) for one in starts]
            for total, (r, c) in zip(sums, vectors, strict=True):
                builder.store(dot(builder, builder.load(total), left[r], right[c]), total)
        for total, here in zip(sums, places, strict=True):
            builder.store(builder.load(total), here, align=4)
        return context.get_dummy_value()

    return signature, generate


def emit_multiply_add(builder, total, a, b):
    """Emit total + a b."""
    return builder.fadd(total, builder.fmul(a, b, flags=["contract"]), flags=["contract"])


def emit_pair_multiply_add(builder, total, a, b):
    """Emit total + a b + a' b', each lane of a and b a pair of bfloat16: by one instruction, or widened to float32."""
    if MULTIPLIES_PAIRS:
        kind = ir.FunctionType(VECTOR, [VECTOR, BFLOAT16_PAIRS, BFLOAT16_PAIRS])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(instruction, [total, builder.bitcast(a, BFLOAT16_PAIRS), builder.bitcast(b, BFLOAT16_PAIRS)])
    low, high = ([n] * LANES for n in (16, 0xFFFF0000))
    for split in (lambda x: builder.shl(x, ir.Constant(PAIRS, low)), lambda x: builder.and_(x, ir.Constant(PAIRS, high))):
        total = emit_multiply_add(builder, total, *(builder.bitcast(split(x), VECTOR) for x in (a, b)))
    return total


@intrinsic
def find_maximum(context, a, at, count):
    """Return the largest of `count` numbers of a contiguous array, from an offset on.

    count is a multiple of COLUMNS. NaN is skipped.
    """
    return make_extreme_intrinsic(a, ">", -math.inf)


@intrinsic
def find_minimum(context, a, at, count):
    """Return the smallest of `count` numbers of a contiguous array, from an offset on.

    count is a multiple of COLUMNS. NaN is skipped.
    """
    return make_extreme_intrinsic(a, "<", math.inf)


def make_extreme_intrinsic(a, comparison, start):
    """Return an intrinsic's signature and code generator, for the largest or smallest of some numbers, or `start`."""
    signature = types.float32(a, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        a, at, count = arguments
        a = get_data_pointer(context, builder, signature.args[0], a)
        choose = functools.partial(emit_extreme, builder, comparison)
        tops = [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [start] * LANES)) for _ in range(VECTORS)]
        with cgutils.for_range(builder, builder.udiv(count, SIZE(COLUMNS))) as loop:
            for c, top in enumerate(tops):
                here = builder.load(
                    get_vector_pointer(builder, a, builder.add(at, builder.mul(loop.index, SIZE(COLUMNS))), c), align=4
                )
                builder.store(choose(here, builder.load(top)), top)
        top, lane, half = functools.reduce(choose, [builder.load(top) for top in tops]), ir.IntType(32), LANES
        while half := half // 2:  # the first lanes against those after them: half as many each time
            order = ir.Constant(ir.VectorType(lane, LANES), [(n + half) % LANES for n in range(LANES)])
            top = choose(top, builder.shuffle_vector(top, top, order))
        return builder.extract_element(top, lane(0))

    return signature, generate


def get_data_pointer(context, builder, kind, x):
    """Return the pointer to an array's numbers."""
    return context.make_array(kind)(context, builder, x).data


def emit_extreme(builder, comparison, a, b):
    """Emit a if it compares so to b, else b; b if either is NaN."""
    return builder.select(builder.fcmp_ordered(comparison, a, b), a, b)


def get_vector_pointer(builder, array, place, number, kind=VECTOR):
    """Return the pointer to a register's worth of numbers, `number` registers after a place."""
    at = builder.gep(array, [builder.add(place, SIZE(number * LANES))])
    return builder.bitcast(at, kind.as_pointer())


def broadcast_lanes(builder, number):
    """Return a register that holds a number in each lane."""
    undefined, lane = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined), ir.IntType(32)
    one = builder.insert_element(undefined, number, lane(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(lane, LANES), [0] * LANES))
