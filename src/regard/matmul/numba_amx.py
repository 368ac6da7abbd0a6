# mypy: ignore-errors
"""A matrix times some vectors by the processor's products of tiles of bfloat16 (Intel's AMX), summed in float32.

A tile register holds up to 16 rows of 64 bytes. Rows of a matrix of bfloat16 are read from where they are; some columns of rows
of int8 or int4 are restored to bfloat16 first. The vectors are rounded to bfloat16 once, in pairs of columns.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.bfloat16 import store_number
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
from regard.matmul.numba_dequantize import RESTORED_EXPONENT, dequantize_int4_groups, restore_int8_for_tiles
from regard.matmul.numba_row_tiles import INT, emit_transposed, load_register

LEAST = tuple(map(count_least_vectors_for_tiles, DTYPES))  # vectors, by the format of the matrix; 0 if never
HAS_TILES = any(LEAST)
EDGE, BYTES = 16, 64  # rows of a tile, and bytes of a row
TILE_BYTES = EDGE * BYTES
ROUNDED_COLUMNS = 512  # of the vectors of a tile at a time: they stay in the L1 cache
ROWS_AHEAD, STEPS_AHEAD = 8, 8  # of the numbers that are prefetched
SUMS, BLOCK_VECTORS = 4, 2 * EDGE  # registers of sums, and the vectors that are multiplied at a time
RESTORED_COLUMNS = SPAN  # at a time: a product of tiles waits for the last numbers that were stored
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
def add_tile_products(context, rows, step, row_tiles, vectors, strides, steps, sums, is_first, ahead):
    """Add to sums the products of up to four tiles of rows with a tile of vectors, or of up to two with two.

    rows, vectors and sums are addresses: of the first row, the next `step` bytes after it; of pairs of columns of the first
    tile of vectors, `strides` bytes apart, and 0 or of the second tile's; of a tile of EDGE x EDGE float32 for each tile of
    rows and, of it, each tile of vectors. The sums are set if it is the first time. Unless ahead is 0, the numbers of steps to
    come are prefetched, in the last steps what is so many bytes ahead: the processor itself follows fewer rows.
    """

    def generate(context, builder, signature, arguments):
        rows, step, row_tiles, vectors, strides, steps, sums, is_first, ahead = arguments
        places, strides = cgutils.unpack_tuple(builder, vectors), cgutils.unpack_tuple(builder, strides)
        has_two = builder.icmp_signed("!=", places[1], SIZE(0))
        for several, is_so in ((1, builder.not_(has_two)), (2, has_two)):
            for r in range(1, SUMS // several + 1):
                with builder.if_then(builder.and_(is_so, builder.icmp_signed("==", row_tiles, SIZE(r)))):
                    emit_tile_products(builder, rows, step, r, places[:several], strides, steps, sums, is_first, ahead)
        return context.get_dummy_value()

    pair = types.UniTuple(types.int64, 2)
    places, flags = (types.int64, types.int64, types.int64), (types.boolean, types.int64)
    return types.void(*places, pair, pair, types.int64, types.int64, *flags), generate


def emit_tile_products(builder, rows, step, row_tiles, vectors, strides, steps, sums, is_first, ahead):
    """Emit the products of some tiles of rows with some tiles of vectors: registers 0 to 3 sum, 4, 5 are rows, 6, 7 vectors.

    A product waits for the one before it on its register, so that fewer than four do not keep the unit busy.
    """
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
        for v, place in enumerate(vectors):
            at = builder.add(place, builder.mul(loop.index, builder.mul(strides[v], SIZE(EDGE))))
            call_amx(builder, "tileloadd64", BYTE(6 + v), builder.inttoptr(at, POINTER), strides[v])
        for r in range(row_tiles):
            at = builder.add(rows, builder.add(builder.mul(step, SIZE(EDGE * r)), builder.mul(loop.index, SIZE(BYTES))))
            call_amx(builder, "tileloadd64", BYTE(4 + r % 2), builder.inttoptr(at, POINTER), step)
            with builder.if_then(builder.icmp_signed("!=", ahead, SIZE(0))):
                is_last = builder.icmp_signed(">=", builder.add(loop.index, SIZE(STEPS_AHEAD)), steps)
                far = builder.add(at, builder.select(is_last, ahead, SIZE(BYTES * STEPS_AHEAD)))
                for n in range(EDGE):
                    emit_prefetch(builder, builder.inttoptr(builder.add(far, builder.mul(step, SIZE(n))), POINTER))
            for v in range(several):
                call_amx(builder, "tdpbf16ps", BYTE(r * several + v), BYTE(4 + r % 2), BYTE(6 + v))
    for n, place in enumerate(places):
        call_amx(builder, "tilestored64", BYTE(n), place, SIZE(BYTES))


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
def restore_rows(matrix, columns, first, last, column, some, out):
    """Restore some columns of rows of int8 or int4 to bfloat16, from a column that is a multiple of BLOCK.

    The same columns of rows to come are prefetched.
    """
    is_int8 = matrix[FORMAT] == INT8
    size, some_bytes = (columns, some) if is_int8 else (columns // 2, some // 2)
    for row in range(first, last):
        pairs, place = matrix[NUMBERS] + size * row, out[row - first].ctypes.data
        numbers = pairs + (column if is_int8 else column // 2)
        for n in range(0, some_bytes, BYTES):
            prefetch(numbers + size * ROWS_AHEAD + n)
        if is_int8:
            groups = matrix[GROUP_SCALES] + ((columns + SPAN - 1) // SPAN * row + column // SPAN) * GROUPS
            restore_int8_for_tiles(numbers, groups, some, place)
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
    while row < last:
        tiles = max(min(most, last - row) // EDGE, 1)
        height = min(EDGE, last - row)
        some = tiles * height
        for column in range(0, columns, width):
            part = min(width, columns - column)
            place, step, ahead = matrix[NUMBERS] + size * row, size, size * (some - 1) + BYTES * STEPS_AHEAD
            if is_restored:
                restore_rows(matrix, columns, row, row + some, column, part, restored)
                place, step, ahead = restored.ctypes.data, 2 * width, 0
            for n in range(len(sums)):
                one = BLOCK_VECTORS * n
                several = min(BLOCK_VECTORS, count - one)
                if (row == first and column == 0) or height < EDGE or len(sums) > 1:
                    set_tile_config(config, height, several)
                start, tile, rest = pairs.ctypes.data + size * one, min(EDGE, several), several - EDGE
                vectors = start + 2 * tile * column, start + size * EDGE + 2 * rest * column if rest > 0 else 0
                strides, steps, here = (4 * tile, 4 * rest), part // TILE_COLUMNS, sums[n].ctypes.data
                add_tile_products(place, step, tiles, vectors, strides, steps, here, column == 0, 0 if n else ahead)
        for n in range(len(sums)):
            store_sums(sums[n], out[BLOCK_VECTORS * n : min(BLOCK_VECTORS * n + BLOCK_VECTORS, count), row : row + some])
        row += some
    load_tile_config(before)
