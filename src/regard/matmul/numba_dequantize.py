# mypy: ignore-errors
"""The numbers of a matrix of int8 or int4, rounded to bfloat16 in one pass, compiled by numba."""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.bfloat16 import convert_to_float32, emit_bfloat16_bits, make_constant, store_number
from regard.compiled.exponentials import SHORTS, emit_bfloat16_rounding
from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import atomic_increment, view_array
from regard.compiled.jit_cache import callback_with_cache
from regard.compiled.kernel_choice import has_lookup_of_16_bits
from regard.compiled.matrix_formats import BLOCK, GROUP, GROUPS, INT8, LARGEST_RESTORED, SPAN
from regard.compiled.register_tiles import LANES, MULTIPLIES_PAIRS, SIZE, VECTOR, BFloat16Type, broadcast_lanes
from regard.compiled.threads import Arguments, integer_fields
from regard.compiled.vectors import ONE, reinterpret_as_float32, reinterpret_as_int32
from regard.matmul.numba_row_tiles import INT, emit_mask, load_register, make_shuffle_mask, repeat

STEP = 2 * GROUPS  # columns of int8 in which each group has two
CHUNK = 16  # rows that a thread takes at a time
LEAST = np.float32(1e-35)  # rows of numbers below this count as zeros: LARGEST_RESTORED divided by less may be infinite
INT8_FACTOR = round(LARGEST_RESTORED * 2**15 / (127 * 255))  # over 2**15: by what a product of int8 and a scale is multiplied
RESTORED_EXPONENT = 112  # of the power of two by which `restore_int8_for_tiles` divides: bfloat16's bias minus float16's
LOOKS_UP = has_lookup_of_16_bits()
BYTES, WORDS = ir.VectorType(ir.IntType(8), GROUP), ir.VectorType(ir.IntType(16), GROUP)
FLOAT16 = ir.VectorType(ir.HalfType(), STEP)


class DequantizeArguments(Arguments):
    """The count of chunks taken so far; the format of the matrix; its size; the addresses of its parts and of the output."""

    _fields_ = integer_fields("taken format rows columns numbers scales group_scales out")


ARGUMENTS = np.dtype(DequantizeArguments)


@intrinsic
def dequantize_int8_row(context, numbers, scale, group_scales, columns, out):
    """Store a row of int8, at an address, at another, times its scale and those of its groups. columns: a multiple of STEP."""
    signature = types.void(types.int64, types.float32, types.int64, types.int64, types.int64)

    def generate(context, builder, signature, arguments):
        numbers, scale, group_scales, columns, out = arguments
        with cgutils.for_range_slice(builder, SIZE(0), columns, SIZE(SPAN)) as (first, _):
            at = builder.add(group_scales, builder.mul(builder.udiv(first, SIZE(SPAN)), SIZE(GROUPS)))
            factors = builder.uitofp(emit_column_scales(builder, at), ir.VectorType(ir.FloatType(), STEP))
            factors = builder.fmul(factors, repeat(builder, scale, STEP))
            last = builder.add(first, SIZE(SPAN))
            last = builder.select(builder.icmp_signed("<", last, columns), last, columns)
            with cgutils.for_range_slice(builder, first, last, SIZE(STEP)) as (p, _):
                at = builder.inttoptr(builder.add(numbers, p), ir.VectorType(ir.IntType(8), STEP).as_pointer())
                found = builder.fmul(builder.sitofp(builder.load(at, align=1), factors.type), factors)
                found, at = emit_step_rounding(builder, found), builder.add(out, builder.mul(p, SIZE(2)))
                builder.store(found, builder.inttoptr(at, found.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return signature, generate


def emit_column_scales(builder, address):
    """Emit the 8-bit scales of the groups at an address, one for each of STEP columns."""
    scales = builder.load(builder.inttoptr(address, ir.VectorType(ir.IntType(8), GROUPS).as_pointer()), align=1)
    return builder.shuffle_vector(scales, scales, make_shuffle_mask([n // 2 for n in range(STEP)]))


def emit_step_rounding(builder, x):
    """Emit the bfloat16 numbers nearest to STEP numbers, by the processor's instruction if there is one."""
    if not MULTIPLIES_PAIRS:
        return emit_bfloat16_bits(builder, x)
    low, high = (builder.shuffle_vector(x, x, make_shuffle_mask(range(n, n + LANES))) for n in (0, LANES))
    kind = ir.FunctionType(ir.VectorType(BFloat16Type(), STEP), [VECTOR, VECTOR])
    rounded = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return builder.bitcast(builder.call(rounded, [high, low]), WORDS)


def emit_rounded_product(builder, x, factor):
    """Emit x times a factor, over 2**15, rounded: (x factor + 2**14) >> 15."""
    kind = ir.FunctionType(WORDS, [WORDS, WORDS])
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.pmul.hr.sw.512")
    return builder.call(multiply, [x, make_constant(WORDS, factor)])


@intrinsic
def restore_int8(context, numbers, group_scales, columns, out):
    """Store columns of a row of int8 as integers up to LARGEST_RESTORED: times the scales of their groups INT8_FACTOR / 2**15.

    All are addresses; the first column is a multiple of STEP. Whole registers are stored, which end in zeros.
    """

    def generate(context, builder, signature, arguments):
        numbers, group_scales, columns, out = arguments
        scales = builder.zext(emit_column_scales(builder, group_scales), WORDS)
        even = builder.sub(columns, builder.urem(columns, SIZE(STEP)))

        def emit_restored(p, rest=None):
            mask = None if rest is None else emit_mask(builder, rest, STEP)
            x = load_register(builder, builder.add(numbers, p), ir.IntType(8), STEP, mask)
            found = emit_rounded_product(builder, builder.mul(builder.sext(x, WORDS), scales), INT8_FACTOR)
            at = builder.inttoptr(builder.add(out, builder.mul(p, SIZE(2))), WORDS.as_pointer())
            builder.store(found, at, align=2)

        with cgutils.for_range_slice(builder, SIZE(0), even, SIZE(STEP)) as (p, _):
            emit_restored(p)
        rest = builder.sub(columns, even)
        with builder.if_then(builder.icmp_signed(">", rest, SIZE(0))):
            emit_restored(even, rest)
        return context.get_dummy_value()

    return types.void(*4 * [types.int64]), generate


@intrinsic
def restore_int8_for_tiles(context, numbers, group_scales, columns, out):
    """Store columns of a row of int8 as bfloat16: times the scales of their groups, over 2**RESTORED_EXPONENT.

    All are addresses; columns is a multiple of STEP, within one SPAN.
    """

    def generate(context, builder, signature, arguments):
        numbers, group_scales, columns, out = arguments
        scales = emit_float16_scales(builder, group_scales)
        with cgutils.for_range_slice(builder, SIZE(0), columns, SIZE(STEP)) as (p, _):
            emit_restored_for_tiles(builder, builder.add(numbers, p), scales, builder.add(out, builder.mul(p, SIZE(2))))
        return context.get_dummy_value()

    return types.void(*4 * [types.int64]), generate


@intrinsic
def store_row_scales(context, group_scales, out):
    """Store the scales of the groups at an address, one for each of STEP columns, as float16 at another."""

    def generate(context, builder, signature, arguments):
        scales = emit_float16_scales(builder, arguments[0])
        builder.store(scales, builder.inttoptr(arguments[1], scales.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def emit_float16_scales(builder, address):
    """Emit the scales of the groups at an address, one for each of STEP columns, as float16."""
    return builder.sitofp(builder.zext(emit_column_scales(builder, address), WORDS), FLOAT16)


def emit_restored_for_tiles(builder, numbers, scales, out):
    """Emit code that stores STEP columns of int8 times their scales, over 2**RESTORED_EXPONENT, as bfloat16.

    The products are rounded to float16, whose sign, exponent and upper 7 bits of the fraction are those of a number of bfloat16
    with that smaller exponent.
    """
    x = builder.sext(load_register(builder, numbers, ir.IntType(8), STEP), WORDS)
    bits = builder.bitcast(builder.fmul(builder.sitofp(x, FLOAT16), scales), WORDS)
    bits = emit_rounded_product(builder, bits, 2**12)  # over 2**3
    bits = builder.and_(bits, make_constant(WORDS, ~0x7000))  # copies of the sign
    builder.store(bits, builder.inttoptr(out, WORDS.as_pointer()), align=2)


@njit_inlined()
def compute_int4(pairs, low_scale, low_offset, high_scale, high_offset, out):
    """Store the lower halves of the bytes of a block times a scale plus an offset, then the upper halves times theirs.

    The block and what is stored are at addresses.
    """
    numbers, found = view_array(pairs, GROUP, np.int8), view_array(out, BLOCK, np.uint16)
    for c in range(GROUP):
        store_number(found, c, np.float32(np.int8(numbers[c] << 4) >> 4) * low_scale + low_offset)
        store_number(found, GROUP + c, np.float32(numbers[c] >> 4) * high_scale + high_offset)


@intrinsic
def look_up_int4(context, pairs, low_scale, low_offset, high_scale, high_offset, out):
    """Do as `compute_int4`: the 16 different numbers of a group are computed once, and looked up."""
    return make_lookup_intrinsic(emit_bfloat16_rounding)


@intrinsic
def look_up_integers(context, pairs, low_scale, low_offset, high_scale, high_offset, out):
    """Do as `look_up_int4`, but store the nearest integers of 16 bits, to which the scales and offsets must lead."""
    return make_lookup_intrinsic(emit_integer_rounding)


def emit_integer_rounding(builder, x):
    """Emit the integers of 16 bits nearest to a register of numbers: the lower bits of their sum with 1.5 * 2**23."""
    shifted = builder.fadd(x, ir.Constant(VECTOR, [1.5 * 2**23] * LANES))
    return builder.trunc(builder.bitcast(shifted, ir.VectorType(ir.IntType(32), LANES)), SHORTS)


def make_lookup_intrinsic(round_numbers):
    """Return an intrinsic's signature and code generator, for numbers that are rounded this way."""
    signature = types.void(types.int64, *4 * [types.float32], types.int64)

    def generate(context, builder, signature, arguments):
        pairs, *factors, out = arguments
        emit_int4_lookup(builder, pairs, [broadcast_lanes(builder, one) for one in factors], out, round_numbers)
        return context.get_dummy_value()

    return signature, generate


def emit_int4_lookup(builder, pairs, factors, out, round_numbers):
    """Emit code that stores the numbers of a block of int4: a scale and an offset of both groups are given in each lane."""
    both = builder.zext(builder.load(builder.inttoptr(pairs, BYTES.as_pointer()), align=1), WORDS)
    integers = ir.Constant(VECTOR, [float(n) for n in (*range(8), *range(-8, 0))])
    twice = ir.Constant(ir.VectorType(ir.IntType(32), GROUP), 2 * list(range(GROUP // 2)))
    kind = ir.FunctionType(WORDS, [WORDS, WORDS])
    look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
    for half, index in enumerate((both, builder.lshr(both, make_constant(WORDS, 4)))):  # of which it reads the lower 5 bits
        scale, offset = factors[2 * half : 2 * half + 2]
        table = round_numbers(builder, builder.fadd(builder.fmul(integers, scale), offset))
        found = builder.call(look_up, [builder.shuffle_vector(table, table, twice), index])
        at = builder.add(out, SIZE(2 * GROUP * half))
        builder.store(found, builder.inttoptr(at, WORDS.as_pointer()), align=2)


def emit_int4_factors(builder, scales, offsets):
    """Emit the scale and the offset of a group of int4, and those of the next, in each lane, from addresses of both pairs."""
    scales, offsets = (
        repeat(builder, builder.load(builder.inttoptr(place, INT.as_pointer()), align=2), LANES) for place in (scales, offsets)
    )
    return [
        builder.bitcast(bits, VECTOR)
        for bits in (
            builder.shl(scales, make_constant(scales.type, 16)),
            builder.shl(offsets, make_constant(offsets.type, 16)),
            builder.and_(scales, make_constant(scales.type, 0xFFFF0000)),
            builder.and_(offsets, make_constant(offsets.type, 0xFFFF0000)),
        )
    ]


restore_int4 = look_up_int4 if LOOKS_UP else compute_int4


@njit_inlined()
def read_two_groups(factors, group):
    """Return the scales and offsets of a group and the next of a row, whose scales are followed by as many offsets."""
    offsets = group + len(factors) // 2
    scale, offset = convert_to_float32(factors[group]), convert_to_float32(factors[offsets])
    return scale, offset, convert_to_float32(factors[group + 1]), convert_to_float32(factors[offsets + 1])


@njit_inlined()
def dequantize_int4_groups(pairs, scales, columns, first, last, out):
    """Store an even number of groups of a row of int4, at an address, at another; its scales are followed by the offsets."""
    factors = view_array(scales, 2 * (columns // GROUP), np.uint16)
    for group in range(first, last, 2):
        scale, offset, other, end = read_two_groups(factors, group)
        restore_int4(pairs + group * GROUP // 2, scale, offset, other, end, out + 2 * (group - first) * GROUP)


@njit_inlined()
def find_largest(scales, offsets):
    """Return a bound of the numbers of a row: its largest 8 |scale| + |offset|, inf or NaN if one is not finite."""
    bits = np.int32(0)
    for group in range(len(scales)):  # by the bits, as in quantize_vector: LLVM vectorizes the maximum of integers
        bound = np.float32(8) * abs(convert_to_float32(scales[group])) + abs(convert_to_float32(offsets[group]))
        bits = max(bits, reinterpret_as_int32(bound))
    return reinterpret_as_float32(np.int32(bits))


@njit_inlined()
def find_int4_factor(scales, columns):
    """Return by what a row of int4 is multiplied to become integers of 16 bits, and their scale, NaN if it is not finite."""
    groups = columns // GROUP
    factors = view_array(scales, 2 * groups, np.uint16)
    top = find_largest(factors[:groups], factors[groups:])
    factor = np.float32(LARGEST_RESTORED) / top if LEAST < top < np.inf else np.float32(0)
    return factor, top / np.float32(LARGEST_RESTORED) if factor > 0 else np.float32(0) * top


@njit_inlined()
def round_int4_groups(pairs, scales, columns, first, last, factor, out):
    """Store an even number of groups of a row of int4, at an address, times a factor, as integers of 16 bits at another."""
    factors = view_array(scales, 2 * (columns // GROUP), np.uint16)
    for group in range(first, last, 2):
        scale, offset, other, end = read_two_groups(factors, group)
        at, to = pairs + group * GROUP // 2, out + 2 * (group - first) * GROUP
        look_up_integers(at, scale * factor, offset * factor, other * factor, end * factor, to)


@njit_inlined()
def round_int4_row(pairs, scales, columns, out):
    """Store a row of int4, at an address, as integers of 16 bits at another; return their scale, NaN if it is not finite."""
    factor, scale = find_int4_factor(scales, columns)
    round_int4_groups(pairs, scales, columns, 0, columns // GROUP, factor, out)
    return scale


@njit_inlined()
def round_int4_row_to_bfloat16(pairs, scales, columns, out):
    """Store a row of int4, at an address, as bfloat16 at another; return its scale, which is 1."""
    dequantize_int4_groups(pairs, scales, columns, 0, columns // GROUP, out)
    return ONE


restore_int4_row = round_int4_row if LOOKS_UP and not MULTIPLIES_PAIRS else round_int4_row_to_bfloat16


@callback_with_cache(DequantizeArguments)
def dequantize_shared(place):
    """Store the rows of a matrix, whose columns are a multiple of BLOCK."""
    a = view_array(place, 1, ARGUMENTS)[0]
    rows, n = a.rows, a.columns
    scales, groups = view_array(a.scales, rows, np.float32), (n + SPAN - 1) // SPAN * GROUPS
    while True:
        first = atomic_increment(place) * CHUNK
        if first >= rows:
            return
        for row in range(first, min(first + CHUNK, rows)):
            if a.format == INT8:
                dequantize_int8_row(a.numbers + n * row, scales[row], a.group_scales + groups * row, n, a.out + 2 * n * row)
            else:
                pairs, scales_of_row = a.numbers + n // 2 * row, a.scales + n // GROUP * 4 * row
                dequantize_int4_groups(pairs, scales_of_row, n, 0, n // GROUP, a.out + 2 * n * row)
