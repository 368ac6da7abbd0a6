# mypy: ignore-errors
"""Products of tiles of bfloat16 by the processor (Intel's AMX), summed in float32, as intrinsics of numba.

A tile register holds up to 16 rows of 64 bytes. Rows of bfloat16 are read from where they are; rows of int8 or int4 are
restored to bfloat16 a block ahead of the products.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.exponentials import emit_bfloat16_rounding
from regard.compiled.intrinsics import emit_prefetch
from regard.compiled.matrix_formats import BLOCK, GROUP, SPAN
from regard.compiled.register_tiles import SIZE, get_data_pointer
from regard.matmul.numba_dequantize import STEP, emit_int4_factors, emit_int4_lookup, emit_restored_for_tiles
from regard.matmul.numba_row_tiles import INT, emit_transposed, load_register

EDGE, BYTES = 16, 64  # rows of a tile, and bytes of a row
TILE_BYTES = EDGE * BYTES
STEPS_AHEAD = 8  # of the numbers that are prefetched
SUMS = 4  # registers of sums
BLOCK_BYTES = 2 * BLOCK  # of bfloat16, restored while the block before it is multiplied
RING_BYTES = 2 * BLOCK_BYTES  # of a row of two such blocks
LINES_AHEAD = 2  # of the numbers that are prefetched for them
BYTE = ir.IntType(8)
POINTER = BYTE.as_pointer()


def call_amx(builder, name, *arguments):
    """Emit a call of one of LLVM's intrinsics of AMX."""
    kind = ir.FunctionType(ir.VoidType(), [one.type for one in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


@intrinsic
def load_tile_config(context, config):
    """Configure this thread's tile registers by an array of 64 bytes; zeros release them."""
    return make_config_intrinsic(config, "ldtilecfg")


@intrinsic
def store_tile_config(context, config):
    """Set an array of 64 bytes to the configuration of this thread's tile registers; zeros if there is none."""
    return make_config_intrinsic(config, "sttilecfg")


def make_config_intrinsic(config, name):
    """Return an intrinsic's signature and code generator: LLVM's intrinsic of a name, called with the bytes of an array.

    The array lives until it returns, which its address alone would not ensure.
    """

    def generate(context, builder, signature, arguments):
        call_amx(builder, name, builder.bitcast(get_data_pointer(context, builder, config, arguments[0]), POINTER))
        return context.get_dummy_value()

    return types.void(config), generate


@intrinsic
def add_tile_products(context, rows, step, ahead, row_tiles, vectors, strides, steps, sums, is_first):
    """Add to sums the products of up to four tiles of rows with a tile of vectors, or of up to two with two.

    rows, vectors and sums are addresses: of the first row, the next `step` bytes after it; of pairs of columns of the first
    tile of vectors, `strides` bytes apart, and 0 or of the second tile's; of a tile of EDGE x EDGE float32 for each tile of
    rows and, of it, each tile of vectors. The sums are set if it is the first time. Unless ahead is 0, the numbers of steps to
    come are prefetched, in the last steps what is so many bytes ahead: the processor itself follows fewer rows.
    """
    return make_products_intrinsic(StoredRows, SUMS)


@intrinsic
def add_int8_products(
    context, ring, start, numbers, row_bytes, scales, next_scales, row_tiles, vectors, strides, steps, sums, is_first
):
    """Do as `add_tile_products` with up to two tiles of rows of int8, and restore each block of columns beside the one before.

    ring is the address of rows of two blocks of bfloat16; `start` bytes further, the first block is restored already. numbers
    is that of the rows of int8, scales that of what `store_float16_scales` stores for them. next_scales is 0, or that for as
    many rows below them, whose first block is restored last.
    """
    return make_products_intrinsic(Int8Rows, SUMS // 2)


@intrinsic
def add_int4_products(
    context, ring, start, numbers, row_bytes, scales, next_scales, row_tiles, vectors, strides, steps, sums, is_first
):
    """Do as `add_int8_products` with rows of int4, whose scales are as they are stored."""
    return make_products_intrinsic(Int4Rows, SUMS // 2)


def make_products_intrinsic(rows, most):
    """Return an intrinsic's signature and code generator: products of up to `most` tiles of rows of a kind."""
    fields = len(rows._fields)

    def generate(context, builder, signature, arguments):
        row_tiles, vectors, strides, steps, sums, is_first = arguments[fields:]
        places, strides = cgutils.unpack_tuple(builder, vectors), cgutils.unpack_tuple(builder, strides)
        has_two = builder.icmp_signed("!=", places[1], SIZE(0))
        for several, is_so in ((1, builder.not_(has_two)), (2, has_two)):
            for r in range(1, min(SUMS // several, most) + 1):
                with builder.if_then(builder.and_(is_so, builder.icmp_signed("==", row_tiles, SIZE(r)))):
                    emit_tile_products(builder, rows(*arguments[:fields]), r, places[:several], strides, steps, sums, is_first)
        return context.get_dummy_value()

    pair = types.UniTuple(types.int64, 2)
    return types.void(*(fields + 1) * [types.int64], pair, pair, types.int64, types.int64, types.boolean), generate


def emit_tile_products(builder, rows, row_tiles, vectors, strides, steps, sums, is_first):
    """Emit the products of some tiles of rows with some tiles of vectors: registers 0 to 3 sum, 4, 5 are rows, 6, 7 vectors."""
    several = len(vectors)
    places = [builder.inttoptr(builder.add(sums, SIZE(TILE_BYTES * n)), POINTER) for n in range(row_tiles * several)]
    with builder.if_else(is_first) as (first, later):
        with first:
            for n in range(len(places)):
                call_amx(builder, "tilezero", BYTE(n))
        with later:
            for n, place in enumerate(places):
                call_amx(builder, "tileloadd64", BYTE(n), place, SIZE(BYTES))
    with cgutils.for_range(builder, steps) as loop:
        place, step, emit_beside = rows.emit_step(builder, loop.index, steps, row_tiles)
        for v, start in enumerate(vectors):
            at = builder.add(start, builder.mul(loop.index, builder.mul(strides[v], SIZE(EDGE))))
            call_amx(builder, "tileloadd64", BYTE(6 + v), builder.inttoptr(at, POINTER), strides[v])
        for r in range(row_tiles):
            at = builder.inttoptr(builder.add(place, builder.mul(step, SIZE(EDGE * r))), POINTER)
            call_amx(builder, "tileloadd64", BYTE(4 + r % 2), at, step)
            for v in range(several):
                emit_beside(EDGE * r + EDGE // several * v, EDGE // several)
                call_amx(builder, "tdpbf16ps", BYTE(r * several + v), BYTE(4 + r % 2), BYTE(6 + v))
    for n, place in enumerate(places):
        call_amx(builder, "tilestored64", BYTE(n), place, SIZE(BYTES))


class StoredRows(NamedTuple):
    """Rows of bfloat16 where they are stored: the first arguments of `add_tile_products`."""

    address: Any
    step: Any
    ahead: Any

    def emit_step(self, builder, index, steps, row_tiles):
        """Emit the address of a step's columns; return it, the bytes between rows, and what prefetches some of the rows."""
        place = builder.add(self.address, builder.mul(index, SIZE(BYTES)))
        is_last = builder.icmp_signed(">=", builder.add(index, SIZE(STEPS_AHEAD)), steps)
        far = builder.add(place, builder.select(is_last, self.ahead, SIZE(BYTES * STEPS_AHEAD)))

        def emit_beside(first, count):
            with builder.if_then(builder.icmp_signed("!=", self.ahead, SIZE(0))):
                for n in range(first, first + count):
                    emit_prefetch(builder, builder.inttoptr(builder.add(far, builder.mul(self.step, SIZE(n))), POINTER))

        return place, self.step, emit_beside


class RestoredRows(NamedTuple):
    """Rows that are restored block by block: the first arguments of `add_int8_products` and `add_int4_products`."""

    ring: Any
    start: Any
    numbers: Any
    row_bytes: Any
    scales: Any
    next_scales: Any

    def emit_step(self, builder, index, steps, row_tiles):
        """Emit the address of a step's columns; return it, the bytes between rows, and what restores the next block.

        Two steps multiply a block: during each, half of the rows are restored.
        """
        rows, size = row_tiles * EDGE, SIZE(self.block_bytes)
        first = builder.mul(builder.and_(index, SIZE(1)), SIZE(rows // 2))
        block = builder.add(builder.lshr(index, SIZE(1)), SIZE(1))
        left = builder.sub(builder.lshr(steps, SIZE(1)), block)
        is_below, lines = builder.icmp_signed("==", left, SIZE(0)), builder.mul(self.row_bytes, SIZE(rows - 1))
        # the first block of the rows below is the one after the last of the rows here, `lines` bytes further
        numbers = builder.add(self.numbers, builder.add(builder.mul(block, size), builder.mul(first, self.row_bytes)))
        numbers = builder.add(numbers, builder.select(is_below, lines, SIZE(0)))
        is_last = builder.icmp_unsigned("<", builder.sub(left, SIZE(1)), SIZE(LINES_AHEAD * BYTES // self.block_bytes))
        far = builder.add(builder.select(is_last, lines, SIZE(0)), SIZE(BYTES * LINES_AHEAD))
        scales, step = self.emit_scales(builder, block, rows)
        scales = builder.select(is_below, self.next_scales, scales)
        is_restored = builder.icmp_signed("!=", scales, SIZE(0))
        scales = builder.add(scales, builder.mul(first, step))
        out = builder.add(self.emit_place(builder, builder.mul(block, SIZE(2))), builder.mul(first, SIZE(RING_BYTES)))

        def emit_beside(first, count):
            with builder.if_then(is_restored):
                for n in range(first // 2, (first + count) // 2):
                    place = builder.add(numbers, builder.mul(self.row_bytes, SIZE(n)))
                    emit_prefetch(builder, builder.inttoptr(builder.add(place, far), POINTER))
                    of_row = builder.add(scales, builder.mul(step, SIZE(n)))
                    self.emit_block(builder, place, of_row, builder.add(out, SIZE(RING_BYTES * n)))

        return self.emit_place(builder, index), SIZE(RING_BYTES), emit_beside

    def emit_place(self, builder, index):
        """Emit the address of a step's columns in the ring."""
        offset = builder.add(self.start, builder.mul(index, SIZE(BYTES)))
        return builder.add(self.ring, builder.and_(offset, SIZE(RING_BYTES - 1)))


class Int8Rows(RestoredRows):
    """Rows of int8."""

    block_bytes = BLOCK

    def emit_scales(self, builder, block, rows):
        """Emit the address of the scales of a block; return it and the bytes between rows."""
        span = builder.udiv(block, SIZE(SPAN // BLOCK))
        return builder.add(self.scales, builder.mul(span, SIZE(rows * BYTES))), SIZE(BYTES)

    def emit_block(self, builder, numbers, scales, out):
        """Emit code that restores a block of a row."""
        factors = load_register(builder, scales, ir.HalfType(), STEP)
        for c in range(0, BLOCK, STEP):
            emit_restored_for_tiles(builder, builder.add(numbers, SIZE(c)), factors, builder.add(out, SIZE(2 * c)))


class Int4Rows(RestoredRows):
    """Rows of int4, each with the scales of all groups and then the offsets."""

    block_bytes = BLOCK // 2

    def emit_scales(self, builder, block, rows):
        """Emit the address of the scales of a block; return it and the bytes between rows: 4 for GROUP // 2 of the numbers."""
        return builder.add(self.scales, builder.mul(block, SIZE(4))), builder.udiv(self.row_bytes, SIZE(GROUP // 2 // 4))

    def emit_block(self, builder, numbers, scales, out):
        """Emit code that restores a block of a row."""
        offsets = builder.add(scales, builder.udiv(self.row_bytes, SIZE(GROUP // 2 // 2)))
        emit_int4_lookup(builder, numbers, emit_int4_factors(builder, scales, offsets), out, emit_bfloat16_rounding)


@intrinsic
def transpose_words(context, numbers, step, out, to_step):
    """Store the transpose of EDGE x EDGE numbers of 32 bits, whose rows are `step` bytes apart, in rows `to_step` bytes apart.

    numbers and out are addresses, which may be equal.
    """

    def generate(context, builder, signature, arguments):
        numbers, step, out, to_step = arguments
        places = [builder.add(numbers, builder.mul(step, SIZE(n))) for n in range(EDGE)]
        rows = [load_register(builder, place, INT, EDGE) for place in places]
        for n, one in enumerate(emit_transposed(builder, rows)):
            place = builder.add(out, builder.mul(to_step, SIZE(n)))
            builder.store(one, builder.inttoptr(place, one.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*4 * [types.int64]), generate
