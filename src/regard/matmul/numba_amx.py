# mypy: ignore-errors
"""A matrix times some vectors by the processor's products of tiles of bfloat16 (Intel's AMX), summed in float32.

A tile register holds up to 16 rows of 64 bytes. Rows of a matrix of bfloat16 are read from where they are; some columns of rows
of int8 or int4 are restored to bfloat16 first. The vectors are rounded to bfloat16 once, in pairs of columns.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.bfloat16 import store_number
from regard.compiled.exponentials import emit_bfloat16_rounding
from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import emit_prefetch, prefetch
from regard.compiled.kernel_choice import count_least_vectors_for_tiles
from regard.compiled.matrix_formats import (
    BLOCK,
    DTYPES,
    FORMAT,
    GROUP,
    GROUP_SCALES,
    GROUPS,
    INT8,
    NUMBERS,
    SCALES,
    SPAN,
    TILE_COLUMNS,
)
from regard.compiled.register_tiles import SIZE, get_data_pointer
from regard.compiled.vectors import ONE, compute_power_of_two, find_largest_bits
from regard.matmul.numba_dequantize import (
    RESTORED_EXPONENT,
    STEP,
    dequantize_int4_groups,
    emit_int4_factors,
    emit_int4_lookup,
    emit_restored_for_tiles,
    restore_int8_for_tiles,
    store_row_scales,
)
from regard.matmul.numba_row_tiles import INT, emit_transposed, load_register

LEAST = tuple(map(count_least_vectors_for_tiles, DTYPES))  # vectors, by the format of the matrix; 0 if never
HAS_TILES = any(LEAST)
EDGE, BYTES = 16, 64  # rows of a tile, and bytes of a row
TILE_BYTES = EDGE * BYTES
ROUNDED_COLUMNS = 512  # of the vectors of a tile at a time: they stay in the L1 cache
ROWS_AHEAD, STEPS_AHEAD = 8, 8  # of the numbers that are prefetched
SUMS, BLOCK_VECTORS = 4, 2 * EDGE  # registers of sums, and the vectors that are multiplied at a time
RESTORED_COLUMNS = SPAN  # at a time, before they are multiplied: a product of tiles waits for the last numbers stored
BLOCK_BYTES = 2 * BLOCK  # of bfloat16, restored while the block before it is multiplied
RING_BYTES = 2 * BLOCK_BYTES  # of a row of two such blocks
LINES_AHEAD = 2  # of the numbers that are prefetched for them
BIAS_OF_EXPONENT = 127  # of float32
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


@njit_inlined()
def uses_tiles(matrix, columns, count):
    """Return whether so many vectors are multiplied by tiles: if whole blocks of columns fill them, and there are enough."""
    least = LEAST[matrix[FORMAT]]
    return least > 0 and count >= least and columns % BLOCK == 0


@njit_inlined()
def find_tile_factor(matrix, x):
    """Return by what a vector is multiplied before it is rounded to bfloat16, and the scale of its products, powers of two.

    int8 is restored as integers over 2**RESTORED_EXPONENT. The largest number of the vector becomes about 2**RESTORED_EXPONENT
    if it is smaller: the sums are about as large as the integers, and only products that are 2**-126 of the largest become 0.
    """
    if matrix[FORMAT] != INT8:
        return ONE, ONE
    exponent = (find_largest_bits(x) >> 23) - BIAS_OF_EXPONENT
    power = min(max(RESTORED_EXPONENT - exponent, 0), BIAS_OF_EXPONENT)
    return compute_power_of_two(power), compute_power_of_two(RESTORED_EXPONENT - power)


@njit_inlined()
def round_for_tiles(matrix, x, first, pairs, factors):
    """Round EDGE vectors, or fewer that are left, to bfloat16, and set the scales of their products.

    pairs holds the vectors by such tiles: two columns of each vector, then the next two.
    """
    several, columns = min(EDGE, len(x) - first), x.shape[1]
    words = pairs.reshape(-1).view(np.uint32)[columns // 2 * first :]
    rows, powers = np.empty((EDGE, ROUNDED_COLUMNS // 2), np.uint32), np.empty(EDGE, np.float32)
    for v in range(several):
        powers[v], factors[first + v] = find_tile_factor(matrix, x[first + v])
    for column in range(0, columns, ROUNDED_COLUMNS):
        part = min(ROUNDED_COLUMNS, columns - column)
        for v in range(several):
            numbers, rounded = x[first + v, column : column + part], rows[v].view(np.uint16)
            for c in range(part):
                store_number(rounded, c, numbers[c] * powers[v])
        here = words[several * column // 2 :]
        for c in range(0, part // 2, EDGE):
            if several == EDGE:
                transpose_words(rows[:, c:].ctypes.data, rows.strides[0], here[EDGE * c :].ctypes.data, BYTES)
                continue
            for n in range(c, c + EDGE):
                here[several * n : several * (n + 1)] = rows[:several, n]


@njit_inlined()
def set_tile_config(config, height, vectors):
    """Configure the registers of `emit_tile_products` for tiles of so many rows, and for up to BLOCK_VECTORS vectors."""
    config[:] = 0
    config[0] = 1  # the palette: 8 registers of 16 rows of 64 bytes
    sizes, heights = config[16:48].view(np.uint16), config[48:]
    first, second = min(vectors, EDGE), max(vectors - EDGE, 0)
    for n in range(SUMS):
        heights[n], sizes[n] = height, 4 * (second if second and n % 2 else first)
    for n in range(4, 6):
        heights[n], sizes[n] = height, BYTES
    heights[6], sizes[6] = EDGE, 4 * first
    heights[7], sizes[7] = EDGE if second else 0, 4 * second
    load_tile_config(config)


@njit_inlined()
def locate_group_scales(matrix, columns, row, column):
    """Return the address of the scales of the groups of a row of int8, in the span of a column."""
    return matrix[GROUP_SCALES] + ((columns + SPAN - 1) // SPAN * row + column // SPAN) * GROUPS


@njit_inlined()
def store_float16_scales(matrix, columns, first, last, out):
    """Store the scales of rows of int8 at an address, as float16: STEP of each row in the first span, then in the next."""
    place = out
    for column in range(0, columns, SPAN):
        for row in range(first, last):
            store_row_scales(locate_group_scales(matrix, columns, row, column), place)
            place += BYTES


@njit_inlined()
def restore_rows(matrix, columns, first, last, column, some, out, step):
    """Restore some columns of rows of int8 or int4 to bfloat16, from a column that is a multiple of BLOCK.

    out is the address of the first row, `step` bytes before the next one. The same columns of rows to come are prefetched.
    """
    is_int8 = matrix[FORMAT] == INT8
    size, some_bytes = (columns, some) if is_int8 else (columns // 2, some // 2)
    for row in range(first, last):
        pairs, place = matrix[NUMBERS] + size * row, out + step * (row - first)
        numbers = pairs + (column if is_int8 else column // 2)
        for n in range(0, some_bytes, BYTES):
            prefetch(numbers + size * ROWS_AHEAD + n)
        if is_int8:
            restore_int8_for_tiles(numbers, locate_group_scales(matrix, columns, row, column), some, place)
        else:
            scales = matrix[SCALES] + columns // GROUP * 4 * row
            dequantize_int4_groups(pairs, scales, columns, column // GROUP, (column + some) // GROUP, place)


@njit_inlined()
def store_sums(sums, out):
    """Set out (vectors, rows) to the sums of tiles, which hold them by rows."""
    vectors, rows = out.shape
    several = 2 if vectors > EDGE else 1
    for r in range(0, rows, EDGE):
        for v in range(several):
            tile, place = sums[r // EDGE * several + v], out[EDGE * v : EDGE * v + EDGE, r : r + EDGE]
            width, height = place.shape
            if height == width == EDGE:
                transpose_words(tile.ctypes.data, BYTES, place.ctypes.data, out.strides[0])
                continue
            transpose_words(tile.ctypes.data, BYTES, tile.ctypes.data, BYTES)
            for n in range(width):
                place[n] = tile[n, :height]


@njit_inlined()
def locate_vectors(pairs, columns, one, several, column):
    """Return the addresses of up to two tiles of vectors at a column, 0 for none, and the bytes between pairs of columns."""
    start, tile, rest = pairs.ctypes.data + 2 * columns * one, min(EDGE, several), max(several - EDGE, 0)
    second = start + 2 * columns * EDGE + 2 * rest * column if rest else 0
    return (start + 2 * tile * column, second), (4 * tile, 4 * rest)


@njit_inlined()
def count_table_bytes(matrix, columns):
    """Return the bytes of the scales, as float16, of two tiles of rows of a matrix: int4 is restored by those it stores."""
    return 2 * EDGE * ((columns + SPAN - 1) // SPAN) * BYTES if matrix[FORMAT] == INT8 else 0


@njit_inlined()
def multiply_restored_by_tiles(matrix, columns, pairs, count, first, last, memory, config, sums, out):
    """Do as `multiply_by_tiles` with up to BLOCK_VECTORS vectors and whole tiles of int8 or int4; return the first row left.

    A block of columns is restored beside the products with the one before, also where it begins the next rows: the processor
    does both at the same time. The sums are those of rows that are restored first, to the bit. memory is for the ring and two
    tables of scales, an array of the caller's: it lives until this returns, which its address alone would not ensure.
    """
    is_int8, most, row, start, is_restored = matrix[FORMAT] == INT8, 2 * EDGE, first, 0, False
    row_bytes, scale_bytes = columns if is_int8 else columns // 2, columns // GROUP * 4
    table_bytes = count_table_bytes(matrix, columns)
    ring = (memory.ctypes.data + BYTES - 1) // BYTES * BYTES  # rows of tiles that cross cache lines take longer
    scales, next_scales = ring + most * RING_BYTES, ring + most * RING_BYTES + table_bytes
    (vectors, strides), steps = locate_vectors(pairs, columns, 0, count, 0), columns // TILE_COLUMNS
    set_tile_config(config, EDGE, count)
    while row + EDGE <= last:
        tiles = min(most, last - row) // EDGE
        some = tiles * EDGE
        if not is_restored:
            restore_rows(matrix, columns, row, row + some, 0, BLOCK, ring + start, RING_BYTES)
            if is_int8:
                store_float16_scales(matrix, columns, row, row + some, scales)
        is_restored = row + 2 * some <= last
        if is_restored and is_int8:
            store_float16_scales(matrix, columns, row + some, row + 2 * some, next_scales)
        if not is_int8:
            scales, next_scales = matrix[SCALES] + scale_bytes * row, matrix[SCALES] + scale_bytes * (row + some)
        restored = ring, start, matrix[NUMBERS] + row_bytes * row, row_bytes, scales, next_scales if is_restored else 0
        if is_int8:
            add_int8_products(*restored, tiles, vectors, strides, steps, sums.ctypes.data, True)
        else:
            add_int4_products(*restored, tiles, vectors, strides, steps, sums.ctypes.data, True)
        store_sums(sums, out[:, row : row + some])
        row, start, scales, next_scales = row + some, (start + 2 * columns) % RING_BYTES, next_scales, scales
    return row


@njit_inlined()
def multiply_by_tiles(matrix, columns, pairs, count, first, last, out):
    """Set out[v, row] to the products of the rows from first to last with vectors that `round_for_tiles` has rounded.

    The bias is not added, nor are they scaled.
    """
    is_restored, size, row = matrix[FORMAT] >= INT8, 2 * columns, first
    width, most = RESTORED_COLUMNS if is_restored else columns, SUMS * EDGE if count <= EDGE else SUMS // 2 * EDGE
    restored = np.empty((most if is_restored else 0, RESTORED_COLUMNS), np.uint16)
    sums = np.empty(((count + BLOCK_VECTORS - 1) // BLOCK_VECTORS, SUMS, EDGE, EDGE), np.float32)
    before, config = np.empty(64, np.uint8), np.empty(64, np.uint8)
    store_tile_config(before)
    if is_restored and count <= BLOCK_VECTORS:
        memory = np.empty(2 * EDGE * RING_BYTES + 2 * count_table_bytes(matrix, columns) + BYTES, np.uint8)
        row = multiply_restored_by_tiles(matrix, columns, pairs, count, first, last, memory, config, sums[0], out)
    while row < last:
        tiles = max(min(most, last - row) // EDGE, 1)
        height = min(EDGE, last - row)
        some = tiles * height
        for column in range(0, columns, width):
            part = min(width, columns - column)
            place, step, ahead = matrix[NUMBERS] + size * row, size, size * (some - 1) + BYTES * STEPS_AHEAD
            if is_restored:
                place, step, ahead = restored.ctypes.data, 2 * width, 0
                restore_rows(matrix, columns, row, row + some, column, part, place, step)
            for n in range(len(sums)):
                one = BLOCK_VECTORS * n
                several = min(BLOCK_VECTORS, count - one)
                if (row == first and column == 0) or height < EDGE or len(sums) > 1:
                    set_tile_config(config, height, several)
                vectors, strides = locate_vectors(pairs, columns, one, several, column)
                steps, here = part // TILE_COLUMNS, sums[n].ctypes.data
                add_tile_products(place, step, 0 if n else ahead, tiles, vectors, strides, steps, here, column == 0)
        for n in range(len(sums)):
            store_sums(sums[n], out[BLOCK_VECTORS * n : min(BLOCK_VECTORS * n + BLOCK_VECTORS, count), row : row + some])
        row += some
    load_tile_config(before)
