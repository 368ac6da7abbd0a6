# mypy: ignore-errors
"""Rows of a matrix of any format times vectors, as fast as the rows can be read from memory, written in LLVM IR.

A tile keeps the sums of some rows with some vectors in registers. Numbers of 16 bits are widened to float32 there. Products of
integers use an instruction that adds two at a time, where a processor has one.
"""

from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.bfloat16 import make_constant
from regard.compiled.intrinsics import LOCALITY, emit_prefetch
from regard.compiled.kernel_choice import (
    adds_int16_products,
    count_least_restored_vectors,
    find_int16_instruction,
    has_float16_conversion,
)
from regard.compiled.matrix_formats import BFLOAT16, BLOCK, FLOAT16, FLOAT32, GROUP, GROUPS, INT4, INT8, SPAN
from regard.compiled.register_tiles import LANES, MULTIPLIES_PAIRS, SIZE, VECTOR, emit_multiply_add, emit_pair_multiply_add

VECTORS = 4  # vectors of a tile; those that are left are multiplied one by one
ROWS = LANES // VECTORS  # rows of a tile, whose sums fill the lanes of a register
VECTORS_IN_CACHE = 32  # vectors multiplied by all rows before the next ones: they stay in the L1 cache
LEAST_RESTORED = count_least_restored_vectors()
LINE, AHEAD = 64, 4  # bytes of a cache line; rows from the one that is multiplied to the one that is prefetched
LEAST_AHEAD = 2**14 if LOCALITY == 2 else 0  # and the fewest bytes between them
TILES_AHEAD = 4  # tiles from the one that is multiplied to the one whose scales of int8 are prefetched
BYTE, SHORT, INT, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
INTS, PAIRS = ir.VectorType(INT, LANES), ir.VectorType(SHORT, 2 * LANES)
RESTORED_BFLOAT16, RESTORED_INT16 = 5, 6  # rows of int4 restored to bfloat16, for vectors of bfloat16, or to integers
RESTORED = RESTORED_BFLOAT16 if MULTIPLIES_PAIRS else RESTORED_INT16
STORED = {FLOAT32: FLOAT, BFLOAT16: SHORT, FLOAT16: SHORT, INT8: BYTE, INT4: BYTE}  # what a register is loaded with
STORED |= {RESTORED: SHORT} if LEAST_RESTORED else {}
BITS = {FLOAT32: 32, BFLOAT16: 16, FLOAT16: 16, INT8: 8, INT4: 4, RESTORED: 16}  # of a number in memory
STEP = {
    **dict.fromkeys((FLOAT32, BFLOAT16, FLOAT16), LANES),
    INT8: 2 * GROUPS,
    INT4: BLOCK,
    RESTORED: 2 * LANES,
}  # columns read at a time
PAIRWISE, CONVERTS = find_int16_instruction(), has_float16_conversion()
ADDS_PAIRS = adds_int16_products()
if ADDS_PAIRS:
    llvmlite.binding.initialize_native_asmparser()  # which reads it in assembly


@intrinsic
def multiply_rows(context, kind, matrix, scales, columns, vectors, size, count, first, last, out, stride):
    """Set out[v stride + row] to the product of vector v and a row, for the rows from first to last, by addresses.

    A vector takes `size` bytes. Bounds are not checked.
    """

    def generate(context, builder, signature, arguments):
        for kind in STORED:
            with builder.if_then(builder.icmp_signed("==", arguments[0], SIZE(kind))):
                emit_rows(builder, kind, *arguments[1:])
        return context.get_dummy_value()

    return types.void(*11 * [types.int64]), generate


def emit_rows(builder, kind, matrix, scales, columns, vectors, size, count, first, last, out, stride):
    """Emit the products of all vectors and rows of a matrix of one format."""
    row_bytes = builder.udiv(builder.mul(columns, SIZE(BITS[kind])), SIZE(8))
    scale_bytes = builder.udiv(columns, SIZE(GROUP // 4))  # of the bfloat16 scales and offsets of an int4 row
    if kind == INT8:
        scale_bytes = builder.mul(builder.udiv(builder.add(columns, SIZE(SPAN - 1)), SIZE(SPAN)), SIZE(GROUPS))
    even = builder.sub(last, builder.urem(builder.sub(last, first), SIZE(ROWS)))
    rest, final = builder.urem(count, SIZE(VECTORS)), builder.sub(count, SIZE(1))
    is_more = builder.icmp_signed(">", count, SIZE(VECTORS))
    least = SIZE(VECTORS - 1) if kind == INT4 else builder.select(is_more, SIZE(1), SIZE(VECTORS - 1))  # as measured
    is_filled = builder.icmp_signed(">=", rest, least)  # by the last vector, which its tile then holds several times
    groups = builder.sub(count, builder.select(is_filled, SIZE(0), rest))
    single = ROWS if kind == INT4 else 1  # rows read at a time with one vector, as measured

    def emit_products(row, one, rows, several):
        those = [builder.add(row, SIZE(n)) for n in range(rows)]
        ones = [builder.add(one, SIZE(v)) for v in range(several)]
        ones = [builder.select(builder.icmp_signed("<", v, count), v, final) for v in ones]
        scaled = those if kind in (INT8, INT4) else []
        operands = (matrix, those, row_bytes), (vectors, ones, size), (scales, scaled, scale_bytes)
        places = [[builder.add(start, builder.mul(n, step)) for n in numbers] for start, numbers, step in operands]
        to = [builder.add(builder.mul(v, stride), row) for v in ones]
        to = [builder.add(out, builder.mul(x, SIZE(4))) for x in to]
        emit_tile(Tile(builder, kind, *places), columns, row_bytes, scale_bytes, to)

    with cgutils.for_range_slice(builder, SIZE(0), groups, SIZE(VECTORS_IN_CACHE)) as (block, _):
        stop = builder.add(block, SIZE(VECTORS_IN_CACHE))
        stop = builder.select(builder.icmp_signed("<", stop, groups), stop, groups)
        with (
            cgutils.for_range_slice(builder, first, even, SIZE(ROWS)) as (row, _),
            cgutils.for_range_slice(builder, block, stop, SIZE(VECTORS)) as (one, _),
        ):
            emit_products(row, one, ROWS, VECTORS)
    with (
        cgutils.for_range_slice(builder, first, even if single > 1 else last, SIZE(single)) as (row, _),
        cgutils.for_range_slice(builder, groups, count, SIZE(1)) as (one, _),
    ):
        emit_products(row, one, single, 1)
    with (
        cgutils.for_range_slice(builder, even, last, SIZE(1)) as (row, _),
        cgutils.for_range_slice(builder, SIZE(0), count if single > 1 else groups, SIZE(1)) as (one, _),
    ):
        emit_products(row, one, 1, 1)


class Tile(NamedTuple):
    """Some rows of a matrix of one format and some vectors: the addresses of each, and of the scales of the groups of a row.

    The offsets of int4 follow the scales of a row, the sums of groups the integers of a vector.
    """

    builder: Any
    kind: int
    rows: list[Any]
    vectors: list[Any]
    scales: list[Any]


def emit_tile(tile, columns, row_bytes, scale_bytes, out):
    """Emit the sums of a tile, and store those of each vector at an address of out."""
    builder, kind, rows = tile.builder, tile.kind, len(tile.rows)
    sums = make_sums(builder, VECTOR, rows * len(tile.vectors))
    if kind in (INT8, RESTORED_INT16):
        emit_spans(tile, columns, row_bytes, scale_bytes, sums)
    else:
        emit_columns(tile, SIZE(0), columns, row_bytes, {0: sums})
    if kind == INT4:
        emit_offsets(tile, columns, sums)
    found = sum_registers(builder, [builder.load(total) for total in sums])
    for v, address in enumerate(out):
        mine = builder.shuffle_vector(found, found, make_shuffle_mask(range(v * rows, (v + 1) * rows)))
        builder.store(mine, builder.inttoptr(address, mine.type.as_pointer()), align=4)


def make_sums(builder, kind, count):
    """Return the places of sums, which start as zeros."""
    sums = [cgutils.alloca_once(builder, kind) for _ in range(count)]
    for total in sums:
        builder.store(ir.Constant(kind, None), total)
    return sums


def emit_columns(tile, first, last, row_bytes, sums):
    """Add the products of columns to the sums, given by the place in a step that they read; first is a multiple of a line."""
    builder, kind = tile.builder, tile.kind
    step, line, count = STEP[kind], 8 * LINE // BITS[kind], builder.sub(last, first)
    lines, even = (builder.sub(last, builder.urem(count, SIZE(several))) for several in (line, step))
    ahead = builder.mul(row_bytes, SIZE(max(len(tile.rows), AHEAD)))
    ahead = builder.select(builder.icmp_signed(">", ahead, SIZE(LEAST_AHEAD)), ahead, SIZE(LEAST_AHEAD))
    with cgutils.for_range_slice(builder, first, lines, SIZE(line)) as (p, _):
        at = builder.add(find_offset(builder, kind, p), ahead)
        for row in tile.rows if 0 in sums else []:  # prefetch the next rows
            emit_prefetch(builder, builder.inttoptr(builder.add(row, at), BYTE.as_pointer()))
        for start in range(0, line, step):
            for place, mine in sums.items():
                emit_step(tile, builder.add(p, SIZE(start + place)), mine)
    with cgutils.for_range_slice(builder, lines, even, SIZE(step)) as (p, _):
        for place, mine in sums.items():
            emit_step(tile, builder.add(p, SIZE(place)), mine)
    for place, mine in sums.items() if kind != INT4 else ():  # whose rows are padded
        rest = builder.sub(builder.sub(last, even), SIZE(place))
        with builder.if_then(builder.icmp_signed(">", rest, SIZE(0))):
            emit_step(tile, builder.add(even, SIZE(place)), mine, rest)


def emit_spans(tile, columns, row_bytes, scale_bytes, sums):
    """Add the products of all columns of integers to the sums: those of a lane in a span, of int8 times its group's scale."""
    builder = tile.builder
    far = builder.mul(scale_bytes, SIZE(TILES_AHEAD * len(tile.rows)))
    groups = range(0, GROUPS, LANES)  # the first of each register
    passes = [groups] if len(sums) == 1 else [[one] for one in groups]  # with few lanes, a tile has no registers for all groups
    with cgutils.for_range_slice(builder, SIZE(0), columns, SIZE(SPAN)) as (first, _):
        last = builder.add(first, SIZE(SPAN))
        last = builder.select(builder.icmp_signed("<", last, columns), last, columns)
        start = builder.mul(builder.udiv(first, SIZE(SPAN)), SIZE(GROUPS))
        scales = [builder.add(one, start) for one in tile.scales]
        for one in scales:
            emit_prefetch(builder, builder.inttoptr(builder.add(one, far), BYTE.as_pointer()))
        for several in passes:
            integers = {2 * group: make_sums(builder, INTS, len(sums)) for group in several}
            emit_columns(tile, first, last, row_bytes, integers)
            for group in several:
                factors = [emit_lane_scales(builder, builder.add(one, SIZE(group))) for one in scales]
                for n, total in enumerate(sums):
                    products, old = builder.sitofp(builder.load(integers[2 * group][n]), VECTOR), builder.load(total)
                    new = emit_multiply_add(builder, old, products, factors[n % len(factors)]) if factors else None
                    builder.store(new or builder.fadd(old, products), total)


def emit_lane_scales(builder, address):
    """Emit the 8-bit scales at an address as float32, one in each lane."""
    scales = builder.load(builder.inttoptr(address, ir.VectorType(BYTE, LANES).as_pointer()), align=1)
    return builder.sitofp(builder.zext(scales, INTS), VECTOR)


def emit_offsets(tile, columns, sums):
    """Add the products of the offsets of rows of int4 with the sums of the groups of the vectors to the sums."""
    builder = tile.builder
    groups = builder.udiv(columns, SIZE(GROUP))
    rows = [builder.add(one, builder.mul(groups, SIZE(2))) for one in tile.scales]
    vectors = [builder.add(one, builder.mul(columns, SIZE(2))) for one in tile.vectors]
    offsets, rest = Tile(builder, BFLOAT16, rows, vectors, []), builder.urem(groups, SIZE(LANES))
    even = builder.sub(groups, rest)
    with cgutils.for_range_slice(builder, SIZE(0), even, SIZE(LANES)) as (p, _):
        emit_step(offsets, p, sums)
    with builder.if_then(builder.icmp_signed(">", rest, SIZE(0))):
        emit_step(offsets, even, sums, rest)


def emit_step(tile, p, sums, rest=None):
    """Add the products of STEP columns, from column p on, or of the rest of a row, to the sums; of int8, a register of them."""
    builder, kind, is_short = tile.builder, tile.kind, tile.kind >= INT8  # of 16 bits
    at = find_offset(builder, kind, p)
    groups = []
    if kind == INT4:
        groups = [emit_group_scales(builder, builder.add(one, builder.udiv(p, SIZE(GROUP // 2)))) for one in tile.scales]
    mask = None if rest is None else emit_mask(builder, rest, 2 * LANES if kind == INT8 else STEP[kind])
    for place in range(0, GROUP, 2 * LANES) if kind == INT4 else (0,):
        here = builder.add(at, SIZE(place))
        numbers = [emit_numbers(builder, kind, builder.add(row, here), mask) for row in tile.rows]
        for half in range(len(numbers[0])):
            start = builder.mul(builder.add(p, SIZE(place + half * GROUP)), SIZE(2 if is_short else 4))
            number, lanes = (SHORT, 2 * LANES) if is_short else (FLOAT, LANES)
            vectors = [load_register(builder, builder.add(one, start), number, lanes, mask) for one in tile.vectors]
            for n, total in enumerate(sums):
                v, r = divmod(n, len(tile.rows))
                a, b, old = numbers[r][half], vectors[v], builder.load(total)
                if kind == RESTORED_BFLOAT16:
                    new = emit_pair_multiply_add(builder, old, a, b)
                elif kind in (INT8, RESTORED_INT16):
                    new = emit_pair_sums(builder, old, a, b, is_alone=len(sums) == 1)
                elif kind == INT4:
                    products = builder.sitofp(emit_pair_products(builder, a, b), VECTOR)
                    new = emit_multiply_add(builder, old, products, groups[r][half])
                else:
                    new = emit_multiply_add(builder, old, a, b)
                builder.store(new, total)


def emit_mask(builder, rest, lanes):
    """Emit which lanes hold one of the columns that are left."""
    places = ir.Constant(ir.VectorType(INT, lanes), list(range(lanes)))
    return builder.icmp_signed("<", places, repeat(builder, builder.trunc(rest, INT), lanes))


def find_offset(builder, kind, p):
    """Return the distance in bytes of column p from the start of its row."""
    return builder.lshr(builder.mul(p, SIZE(BITS[kind])), SIZE(3), flags=["exact"])


def emit_numbers(builder, kind, address, mask):
    """Emit the registers of numbers, widened, that follow an address: one, or two of int4."""
    x = load_register(builder, address, STORED[kind], LANES if kind in (FLOAT32, BFLOAT16, FLOAT16) else 2 * LANES, mask)
    if kind == INT4:  # the halves of a byte, with the sign of their upper bit
        x, four, twelve = builder.sext(x, PAIRS), *(make_constant(PAIRS, n) for n in (4, 12))
        return [builder.ashr(builder.shl(x, twelve), twelve), builder.ashr(x, four)]
    if kind == RESTORED:
        return [x]
    if kind == INT8:
        return [builder.sext(x, PAIRS)]
    if kind == BFLOAT16:
        return [builder.bitcast(builder.shl(builder.zext(x, INTS), make_constant(INTS, 16)), VECTOR)]
    return [emit_widened_float16(builder, x) if kind == FLOAT16 else x]


def emit_widened_float16(builder, x):
    """Emit the float32 numbers of the bits of float16: by the instruction, else by shifts and an exact product."""
    if CONVERTS:
        return builder.fpext(builder.bitcast(x, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
    x = builder.zext(x, INTS)
    bits = builder.shl(builder.and_(x, make_constant(INTS, 0x7FFF)), make_constant(INTS, 13))
    size = builder.bitcast(builder.fmul(builder.bitcast(bits, VECTOR), make_constant(VECTOR, 2.0**112)), INTS)
    is_finite = builder.icmp_unsigned("<", bits, make_constant(INTS, 0x7C00 << 13))
    size = builder.select(is_finite, size, builder.or_(bits, make_constant(INTS, 0x7F800000)))
    return builder.bitcast(
        builder.or_(size, builder.shl(builder.and_(x, make_constant(INTS, 0x8000)), make_constant(INTS, 16))), VECTOR
    )


def emit_group_scales(builder, address):
    """Emit two neighboring bfloat16 scales as float32, each repeated in a register."""
    both = repeat(builder, builder.load(builder.inttoptr(address, INT.as_pointer()), align=1), LANES)
    low, high = builder.shl(both, make_constant(INTS, 16)), builder.and_(both, make_constant(INTS, 0xFFFF0000))
    return [builder.bitcast(one, VECTOR) for one in (low, high)]


def emit_pair_products(builder, a, b):
    """Emit a b + a' b' of two neighbors in each lane."""
    if PAIRWISE is not None:
        kind = ir.FunctionType(INTS, [PAIRS, PAIRS])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, PAIRWISE), [a, b])
    every = builder.mul(*(builder.sext(x, ir.VectorType(INT, 2 * LANES)) for x in (a, b)))
    return builder.add(*(builder.shuffle_vector(every, every, make_shuffle_mask(range(n, 2 * LANES, 2))) for n in (0, 1)))


def emit_pair_sums(builder, old, a, b, is_alone=False):
    """Emit old + a b + a' b' of two neighbors in each lane: by one instruction where there is one, unless the sum is alone.

    It is written in assembly, since LLVM splits it again into a product and a sum if others follow. That is slower where many
    sums take turns, and faster for one sum, which waits for the addition only.
    """
    if is_alone or not ADDS_PAIRS:
        return builder.add(old, emit_pair_products(builder, a, b))
    return builder.asm(ir.FunctionType(INTS, [INTS, PAIRS, PAIRS]), "vpdpwssd $3, $2, $0", "=v,0,v,v", [old, a, b], False)


def load_register(builder, address, number, lanes, mask=None):
    """Load numbers from an address; where a mask is False, they are 0 and memory is not read."""
    kind = ir.VectorType(number, lanes)
    pointer = builder.inttoptr(address, kind.as_pointer())
    if mask is None:
        return builder.load(pointer, align=1)
    signature = ir.FunctionType(kind, [pointer.type, INT, mask.type, kind])
    name = f"llvm.masked.load.v{lanes}{'f32' if number is FLOAT else number}.p0"
    load = cgutils.get_or_insert_function(builder.module, signature, name)
    return builder.call(load, [pointer, INT(1), mask, ir.Constant(kind, None)])


def sum_registers(builder, several):
    """Emit the sums of registers in the first lanes of one: neighbors are added until one number is left of each."""
    add = builder.fadd if several[0].type.element == FLOAT else builder.add
    lanes, wanted = LANES, len(several)
    while len(several) > 1:
        several = [
            add(*(builder.shuffle_vector(x, y, make_shuffle_mask(range(n, 2 * lanes, 2))) for n in (0, 1)))
            for x, y in zip(several[::2], several[1::2], strict=True)
        ]
    (found,) = several
    while lanes > wanted:
        found = add(*(builder.shuffle_vector(found, found, make_shuffle_mask(range(n, lanes, 2))) for n in (0, 1)))
        lanes //= 2
    return found


def repeat(builder, x, lanes):
    """Repeat a number in each lane."""
    undefined = ir.Constant(ir.VectorType(x.type, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, x, INT(0)), undefined, make_shuffle_mask([0] * lanes))


def make_shuffle_mask(places):
    """Return the constant that selects these lanes in a shuffle."""
    return ir.Constant(ir.VectorType(INT, len(places)), list(places))


def emit_transposed(builder, block):
    """Emit the transpose of as many registers as one has lanes: at each step, of blocks twice as large."""
    block, size = list(block), 1
    while size < len(block):
        low = [n if not n & size else n - size + len(block) for n in range(len(block))]
        high = [n + size if not n & size else n + len(block) for n in range(len(block))]
        for n in range(len(block)):
            if not n & size:
                pair = block[n], block[n + size]
                block[n], block[n + size] = (builder.shuffle_vector(*pair, make_shuffle_mask(x)) for x in (low, high))
        size *= 2
    return block
