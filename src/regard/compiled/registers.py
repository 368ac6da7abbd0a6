# mypy: ignore-errors
"""A matrix product small enough for the processor's registers, of which the compiled passes make theirs.

Loops in Python, compiled by numba, would leave its sums in memory; said in LLVM's language, each group of them is a register.
"""

import functools
import math

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

FEATURES = binding.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8 if FEATURES.get("avx2") else 4  # float32 in a register
VECTORS = 2  # registers side by side
ROWS = 4 if LANES == 8 else 8  # of sums; a processor with registers of 8 lanes has half as many of them
COLUMNS = VECTORS * LANES
SIZE, VECTOR = ir.IntType(64), ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def tile(context, a, at, row, step, b, start, depth, out, place, stride):
    """out = a b, ROWS x COLUMNS numbers of it: of contiguous arrays, from an offset on in each. Nothing is checked.

    a[r, p] is at + r row + p step; b[p, c] is start + p COLUMNS + c; out[r, c] is place + r stride + c; p is below depth.
    """
    return product(a, b, out, onto=False)


@intrinsic
def tile_onto(context, a, at, row, step, b, start, depth, out, place, stride):
    """out += a b, as `tile` has them."""
    return product(a, b, out, onto=True)


def product(a, b, out, onto):
    """What numba asks of an intrinsic, for a tile that is added to what is there, or put in its place."""
    signature = types.void(a, types.intp, types.intp, types.intp, b, types.intp, types.intp, out, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        a, at, row, step, b, start, depth, out, place, stride = arguments
        kinds = (signature.args[0], signature.args[4], signature.args[7])
        a, b, out = (context.make_array(kind)(context, builder, x).data for kind, x in zip(kinds, (a, b, out), strict=True))
        vectors = [(r, c) for r in range(ROWS) for c in range(VECTORS)]
        places = [vector(builder, out, builder.add(place, builder.mul(stride, SIZE(r))), c) for r, c in vectors]
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in vectors]
        for total, here in zip(sums, places, strict=True):
            builder.store(builder.load(here, align=4) if onto else ir.Constant(VECTOR, [0.0] * LANES), total)
        with cgutils.for_range(builder, depth) as loop:
            panel = builder.add(start, builder.mul(loop.index, SIZE(COLUMNS)))
            right = [builder.load(vector(builder, b, panel, c), align=4) for c in range(VECTORS)]
            first = builder.add(at, builder.mul(loop.index, step))
            left = [everywhere(builder, a, builder.add(first, builder.mul(row, SIZE(r)))) for r in range(ROWS)]
            for total, (r, c) in zip(sums, vectors, strict=True):
                product = builder.fmul(left[r], right[c], flags=["contract"])
                builder.store(builder.fadd(builder.load(total), product, flags=["contract"]), total)
        for total, here in zip(sums, places, strict=True):
            builder.store(builder.load(total), here, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def highest(context, a, at, count):
    """The largest of `count` numbers of a contiguous array from an offset on, a multiple of COLUMNS; a NaN is passed by."""
    signature = types.float32(a, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        a, at, count = arguments
        a = context.make_array(signature.args[0])(context, builder, a).data
        tops = [cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [-math.inf] * LANES)) for _ in range(VECTORS)]
        with cgutils.for_range(builder, builder.udiv(count, SIZE(COLUMNS))) as loop:
            for c, top in enumerate(tops):
                here = builder.load(vector(builder, a, builder.add(at, builder.mul(loop.index, SIZE(COLUMNS))), c), align=4)
                builder.store(larger(builder, here, builder.load(top)), top)
        top = functools.reduce(functools.partial(larger, builder), [builder.load(top) for top in tops])
        found = [builder.extract_element(top, ir.IntType(32)(n)) for n in range(LANES)]
        return functools.reduce(functools.partial(larger, builder), found)

    return signature, generate


def larger(builder, a, b):
    """a where it is more than b, otherwise b."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def vector(builder, array, place, number):
    """Where a register's worth of numbers lies, so many registers after a place."""
    at = builder.gep(array, [builder.add(place, SIZE(number * LANES))])
    return builder.bitcast(at, VECTOR.as_pointer())


def everywhere(builder, array, place):
    """A register that holds one number of an array in each lane."""
    undefined, lane = ir.Constant(VECTOR, ir.Undefined), ir.IntType(32)
    one = builder.insert_element(undefined, builder.load(builder.gep(array, [place])), lane(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(lane, LANES), [0] * LANES))
