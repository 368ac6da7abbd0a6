# mypy: ignore-errors
"""A matrix times some vectors by the processor's products of tiles of bfloat16 (Intel's AMX), summed in float32.

A tile register holds up to 16 rows of 64 bytes. Rows of a matrix of bfloat16 are read from where they are; rows of int4 are
restored to bfloat16 first. The vectors are rounded to bfloat16 once, in pairs of columns.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.bfloat16 import store_number
from regard.compiled.inlined import njit_inlined
from regard.compiled.kernel_choice import count_least_vectors_for_tiles
from regard.compiled.matrix_formats import (
    BLOCK,
    DTYPES,
    FORMAT,
    GROUP,
    INT4,
    NUMBERS,
    SCALES,
    TILE_COLUMNS,
)
from regard.compiled.register_tiles import SIZE, get_data_pointer
from regard.compiled.vectors import ONE
from regard.matmul.numba_dequantize import dequantize_int4_row
from regard.matmul.numba_row_tiles import INT, emit_transposed, load_register

LEAST = tuple(map(count_least_vectors_for_tiles, DTYPES))  # vectors, by the format of the matrix; 0 if never
HAS_TILES = any(LEAST)
EDGE, BYTES = 16, 64  # rows of a tile, and bytes of a row
BLOCK_ROWS, BLOCK_VECTORS = 2 * EDGE, 2 * EDGE  # multiplied at a time: four tiles of sums, and two each of rows and vectors
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
def multiply_tiles(context, rows, step, row_tiles, vectors, stride, steps, sums):
    """Set sums to the products of one or two tiles of rows, `step` bytes apart, with a tile of vectors, or with two.

    rows, vectors and sums are addresses: of the first row; of pairs of columns of the first tile of vectors, `stride` bytes
    apart, and 0 or of the second tile's, a UniTuple; of 2 x 2 tiles of EDGE x EDGE float32.
    """

    def generate(context, builder, signature, arguments):
        rows, step, row_tiles, vectors, stride, steps, sums = arguments
        places, strides = cgutils.unpack_tuple(builder, vectors), cgutils.unpack_tuple(builder, stride)
        has_two_rows = builder.icmp_signed(">", row_tiles, SIZE(1))
        has_two = builder.icmp_signed("!=", places[1], SIZE(0))
        for r, condition in ((2, has_two_rows), (1, builder.not_(has_two_rows))):
            for v, other in ((2, has_two), (1, builder.not_(has_two))):
                with builder.if_then(builder.and_(condition, other)):
                    emit_tile_products(builder, rows, step, r, places[:v], strides, steps, sums)
        return context.get_dummy_value()

    pair = types.UniTuple(types.int64, 2)
    return types.void(types.int64, types.int64, types.int64, pair, pair, types.int64, types.int64), generate


def emit_tile_products(builder, rows, step, row_tiles, vectors, strides, steps, sums):
    """Emit the products of some tiles of rows with some tiles of vectors: registers 0 to 3 sum, 4, 5 are rows, 6, 7 vectors."""
    tiles = [(r, v) for r in range(row_tiles) for v in range(len(vectors))]
    for r, v in tiles:
        call_amx(builder, "tilezero", BYTE(2 * r + v))
    with cgutils.for_range(builder, steps) as loop:
        for v, place in enumerate(vectors):
            at = builder.add(place, builder.mul(loop.index, builder.mul(strides[v], SIZE(EDGE))))
            call_amx(builder, "tileloadd64", BYTE(6 + v), builder.inttoptr(at, POINTER), strides[v])
        for r in range(row_tiles):
            at = builder.add(rows, builder.add(builder.mul(step, SIZE(EDGE * r)), builder.mul(loop.index, SIZE(BYTES))))
            call_amx(builder, "tileloadd64", BYTE(4 + r), builder.inttoptr(at, POINTER), step)
        for r, v in tiles:
            call_amx(builder, "tdpbf16ps", BYTE(2 * r + v), BYTE(4 + r), BYTE(6 + v))
    for r, v in tiles:
        at = builder.add(sums, SIZE(4 * EDGE * EDGE * (2 * r + v)))
        call_amx(builder, "tilestored64", BYTE(2 * r + v), builder.inttoptr(at, POINTER), SIZE(4 * EDGE))


@intrinsic
def transpose_sums(context, sums, out, step):
    """Store the transpose of EDGE x EDGE numbers of 32 bits, at an address, at another, its rows `step` bytes apart."""

    def generate(context, builder, signature, arguments):
        sums, out, step = arguments
        rows = [load_register(builder, builder.add(sums, SIZE(4 * EDGE * n)), INT, EDGE) for n in range(EDGE)]
        for n, one in enumerate(emit_transposed(builder, rows)):
            place = builder.add(out, builder.mul(step, SIZE(n)))
            builder.store(one, builder.inttoptr(place, one.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*3 * [types.int64]), generate


@njit_inlined()
def uses_tiles(matrix, columns, count):
    """Return whether so many vectors are multiplied by tiles: if whole blocks of columns fill them, and there are enough."""
    least = LEAST[matrix[FORMAT]]
    return least > 0 and count >= least and columns % BLOCK == 0


@njit_inlined()
def round_for_tiles(x, one, count, pairs):
    """Round one of several vectors to bfloat16; return 1, its scale.

    pairs holds them by tiles of EDGE vectors, fewer in the last: of a tile, two columns of each vector, then the next two.
    """
    first, rounded = one // EDGE * EDGE, np.empty(len(x), np.uint16)
    for c in range(len(x)):
        store_number(rounded, c, x[c])
    several, words = min(EDGE, count - first), pairs.reshape(-1).view(np.uint32)
    start, both = first * len(x) // 2 + one - first, rounded.view(np.uint32)
    for c in range(len(both)):
        words[start + several * c] = both[c]
    return ONE


@njit_inlined()
def set_tile_config(config, rows, vectors):
    """Configure the registers of `emit_tile_products` for up to BLOCK_ROWS rows and BLOCK_VECTORS vectors."""
    config[:] = 0
    config[0] = 1  # the palette: 8 registers of 16 rows of 64 bytes
    sizes, heights = config[16:48].view(np.uint16), config[48:]
    for n in range(2):
        height, width = min(max(rows - EDGE * n, 0), EDGE), min(max(vectors - EDGE * n, 0), EDGE)
        heights[4 + n], sizes[4 + n] = height, BYTES if height else 0
        heights[6 + n], sizes[6 + n] = EDGE if width else 0, 4 * width
    for n in range(4):
        is_used = heights[4 + n // 2] and sizes[6 + n % 2]
        heights[n], sizes[n] = heights[4 + n // 2] if is_used else 0, sizes[6 + n % 2] if is_used else 0
    load_tile_config(config)


@njit_inlined()
def restore_int4_rows(matrix, columns, first, last, out):
    """Restore rows of int4 to bfloat16."""
    for row in range(first, last):
        pairs, scales = matrix[NUMBERS] + columns // 2 * row, matrix[SCALES] + columns // GROUP * 4 * row
        dequantize_int4_row(pairs, scales, columns, out.ctypes.data + 2 * columns * (row - first))


@njit_inlined()
def store_sums(sums, out):
    """Set out (vectors, rows) to the sums of tiles, which hold them by rows."""
    vectors, rows = out.shape
    for r in range(0, rows, EDGE):
        for v in range(0, vectors, EDGE):
            tile, height, width = sums[r // EDGE, v // EDGE], min(EDGE, rows - r), min(EDGE, vectors - v)
            if height == width == EDGE:
                transpose_sums(tile.ctypes.data, out[v:, r:].ctypes.data, out.strides[0])
                continue
            transpose_sums(tile.ctypes.data, tile.ctypes.data, 4 * EDGE)
            for n in range(width):
                out[v + n, r : r + height] = tile[n, :height]


@njit_inlined()
def multiply_by_tiles(matrix, columns, pairs, count, first, last, out):
    """Set out[v, row] to the products of the rows from first to last with vectors that `round_for_tiles` has rounded.

    The bias is not added.
    """
    is_int4, step = matrix[FORMAT] == INT4, 2 * columns
    restored = np.empty((BLOCK_ROWS if is_int4 else 0, columns), np.uint16)
    sums = np.empty((2, 2, EDGE, EDGE), np.float32)
    before, config = np.empty(64, np.uint8), np.empty(64, np.uint8)
    store_tile_config(before)
    for row in range(first, last, BLOCK_ROWS):
        some, place = min(BLOCK_ROWS, last - row), matrix[NUMBERS] + step * row
        if is_int4:
            restore_int4_rows(matrix, columns, row, row + some, restored)
            place = restored.ctypes.data
        for one in range(0, count, BLOCK_VECTORS):
            several = min(BLOCK_VECTORS, count - one)
            if one or row == first or some < BLOCK_ROWS or several < count:
                set_tile_config(config, some, several)
            start, tile = pairs.ctypes.data + step * one, min(EDGE, several)
            vectors = start, start + step * EDGE if several > EDGE else 0
            strides = 4 * tile, 4 * (several - EDGE)
            multiply_tiles(place, step, (some + EDGE - 1) // EDGE, vectors, strides, columns // TILE_COLUMNS, sums.ctypes.data)
            store_sums(sums, out[one : one + several, row : row + some])
    load_tile_config(before)
