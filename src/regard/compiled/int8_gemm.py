# mypy: ignore-errors
"""Products of int8 rows with int16 vectors, in integers, where a processor adds two products at a time.

A vector is a scale times integers, small enough that a sum of products does not overflow.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.intrinsics import emit_prefetch
from regard.compiled.kernel_choice import find_int16_instruction
from regard.compiled.register_tiles import LANES, SIZE, get_data_pointer
from regard.compiled.vectors import REASSOCIATED, ZERO, add_bias

VECTORS = 4
BLOCK = 32  # vectors multiplied by all rows before the next block: they stay in the L1 cache
ROWS, INT16_COUNT = (
    LANES // VECTORS,
    2 * LANES,
)  # rows per tile, whose sums with VECTORS vectors fill a register; numbers per load
INT, FLOAT = ir.IntType(32), ir.FloatType()
BYTE, SHORT, WORD = (
    ir.VectorType(ir.IntType(bits), count) for bits, count in ((8, INT16_COUNT), (16, INT16_COUNT), (32, LANES))
)
SOME = ir.VectorType(FLOAT, ROWS)
LOW = np.float32(1e-30)  # vectors below this count as zeros: dividing by less may give infinity
PAIRWISE = find_int16_instruction()


@njit(fastmath=REASSOCIATED, error_model="numpy")
def quantize_vector(x, most, out):
    """Quantize a vector to integers of at most `most` in size; return their scale.

    The scale is NaN if a number is not finite.
    """
    top, lost = ZERO, ZERO
    for c in range(len(x)):
        top = max(top, abs(x[c]))
        lost += ZERO * x[c]
    factor = np.float32(most) / top if lost == ZERO and top > LOW else ZERO
    for c in range(len(x)):
        out[c] = np.int16(np.rint(x[c] * factor))
    return (top / np.float32(most) if factor > ZERO else ZERO) + lost


@intrinsic
def multiply_int8_tile(context, a, row, b, one, columns, depth, factors, scales, out, rows, wanted):
    """Set out[one + v, row + r] = factors[one + v] scales[row + r] Σ a[row + r, p] b[one + v, p], p below depth.

    Multiplies ROWS int8 rows of a by VECTORS int16 vectors of b, of which the first `wanted` are stored; depth is a multiple of
    INT16_COUNT. All arrays are contiguous, a and b with `columns` columns, out with `rows`. Bounds are not checked.
    """
    signature = types.void(a, types.intp, b, types.intp, types.intp, types.intp, factors, scales, out, types.intp, types.intp)

    def generate(context, builder, signature, arguments):
        a, row, b, one, columns, depth, factors, scales, out, rows, wanted = arguments
        a, b, factors, scales, out = (
            get_data_pointer(context, builder, signature.args[n], x)
            for n, x in ((0, a), (2, b), (6, factors), (7, scales), (8, out))
        )
        sums = [cgutils.alloca_once_value(builder, ir.Constant(WORD, [0] * LANES)) for _ in range(LANES)]
        with cgutils.for_range(builder, builder.udiv(depth, SIZE(INT16_COUNT))) as loop:
            p = builder.mul(loop.index, SIZE(INT16_COUNT))
            for r in range(ROWS):  # prefetch the next rows
                emit_prefetch(builder, builder.gep(a, [builder.add(builder.mul(builder.add(row, SIZE(ROWS + r)), columns), p)]))
            left = [builder.sext(load_register(builder, a, row, r, columns, p, BYTE), SHORT) for r in range(ROWS)]
            right = [load_register(builder, b, one, v, columns, p, SHORT) for v in range(VECTORS)]
            for n, total in enumerate(sums):
                both = emit_pair_products(builder, left[n % ROWS], right[n // ROWS])
                builder.store(builder.add(builder.load(total), both), total)
        found = builder.sitofp(sum_registers(builder, [builder.load(total) for total in sums]), ir.VectorType(FLOAT, LANES))
        scale = builder.load(builder.bitcast(builder.gep(scales, [row]), SOME.as_pointer()), align=4)
        for v in range(VECTORS):
            place = builder.add(one, SIZE(v))
            with builder.if_then(builder.icmp_signed("<", SIZE(v), wanted)):
                mine = builder.shuffle_vector(found, found, make_shuffle_mask(range(v * ROWS, (v + 1) * ROWS)))
                factor = builder.load(builder.gep(factors, [place]))
                both = builder.fmul(scale, repeat_for_rows(builder, factor))
                here = builder.gep(out, [builder.add(builder.mul(place, rows), row)])
                builder.store(builder.fmul(mine, both), builder.bitcast(here, SOME.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, generate


def load_register(builder, x, first, number, columns, p, kind):
    """Load a register's worth of the row first + number, from column p on."""
    place = builder.add(builder.mul(builder.add(first, SIZE(number)), columns), p)
    return builder.load(builder.bitcast(builder.gep(x, [place]), kind.as_pointer()), align=1)


def emit_pair_products(builder, a, b):
    """Emit a b + a' b' of two neighbors in each lane."""
    if PAIRWISE is not None:
        kind = ir.FunctionType(WORD, [SHORT, SHORT])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, PAIRWISE), [a, b])
    vector_type = ir.VectorType(INT, INT16_COUNT)
    every = builder.mul(builder.sext(a, vector_type), builder.sext(b, vector_type))
    return builder.add(*(builder.shuffle_vector(every, every, make_shuffle_mask(range(n, INT16_COUNT, 2))) for n in (0, 1)))


def sum_registers(builder, several):
    """Emit the sums of LANES registers, one per lane of one register: neighbors are added until one number is left of each."""
    while len(several) > 1:
        pairs = zip(several[::2], several[1::2], strict=True)
        several = [
            builder.add(*(builder.shuffle_vector(x, y, make_shuffle_mask(range(n, 2 * LANES, 2))) for n in (0, 1)))
            for x, y in pairs
        ]
    return several[0]


def repeat_for_rows(builder, x):
    """Repeat a number in each of ROWS lanes."""
    undefined = ir.Constant(SOME, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, x, INT(0)), undefined, make_shuffle_mask([0] * ROWS))


def make_shuffle_mask(places):
    """Return the constant that selects these lanes in a shuffle."""
    return ir.Constant(ir.VectorType(INT, len(places)), list(places))


@njit
def multiply_int8_rows(x, factors, first, last, matrix, scales, bias, out):
    """Set out[v, row] = factors[v] scales[row] Σ matrix[row] x[v] + bias[row], of int8 rows and int16 vectors.

    x has a multiple of VECTORS vectors; those beyond the rows of out may hold anything. bias may be empty.
    """
    rows, columns = matrix.shape
    several, even = first + (last - first) // ROWS * ROWS, columns // INT16_COUNT * INT16_COUNT
    flat, vectors, output = matrix.reshape(matrix.size), x.reshape(x.size), out.reshape(out.size)
    for block in range(0, len(out), BLOCK):
        for row in range(first, several, ROWS):
            for one in range(block, min(block + BLOCK, len(out)), VECTORS):
                multiply_int8_tile(flat, row, vectors, one, columns, even, factors, scales, output, rows, len(out) - one)
    for n in range(len(out)):
        for row in range(first if even < columns else several, last):
            rest = np.float32(sum_remaining_products(matrix[row], x[n], even if row < several else 0)) * (
                factors[n] * scales[row]
            )
            out[n, row] = out[n, row] + rest if row < several else rest
    for n in range(len(out) if len(bias) else 0):
        add_bias(out[n, first:last], bias[first:last])


@njit
def sum_remaining_products(a, b, start):
    """Compute the sum of the products of int8 and int16 numbers, from index start on."""
    total = np.int32(0)
    for p in range(start, len(a)):
        total += np.int32(np.int32(a[p]) * np.int32(b[p]))
    return total
