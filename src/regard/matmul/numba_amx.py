# mypy: ignore-errors
"""A matrix times some vectors by products of tiles of bfloat16 (Intel's AMX).

Rows of a matrix of bfloat16 are read from where they are; some columns of rows of int8 or int4 are restored to bfloat16 first.
The vectors are rounded to bfloat16 once, in pairs of columns.
"""

import numpy as np

from regard.compiled.bfloat16 import store_number
from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import prefetch
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
from regard.compiled.vectors import ONE, compute_power_of_two, find_largest_bits
from regard.matmul.amx_intrinsics import (
    BYTES,
    EDGE,
    RING_BYTES,
    STEPS_AHEAD,
    SUMS,
    add_int4_products,
    add_int8_products,
    add_tile_products,
    load_tile_config,
    store_tile_config,
    transpose_words,
)
from regard.matmul.numba_dequantize import (
    RESTORED_EXPONENT,
    dequantize_int4_groups,
    restore_int8_for_tiles,
    store_row_scales,
)

LEAST = tuple(map(count_least_vectors_for_tiles, DTYPES))  # vectors, by the format of the matrix; 0 if never
HAS_TILES = any(LEAST)
ROUNDED_COLUMNS = 512  # of the vectors of a tile at a time: they stay in the L1 cache
ROWS_AHEAD = 8  # of the numbers that are prefetched
BLOCK_VECTORS = 2 * EDGE  # that are multiplied at a time
RESTORED_COLUMNS = SPAN  # at a time, before they are multiplied: a product of tiles waits for the last numbers stored
BIAS_OF_EXPONENT = 127  # of float32


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
