# mypy: ignore-errors
"""A matrix of int8 or int4 times many vectors, by sums of products of 16-bit integers that stay in registers.

A panel is some rows and columns of the matrix, restored to integers once for all vectors. It is stored by pairs of columns, so
that a register holds the same pair of several rows.
"""

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.compiled.inlined import njit_inlined
from regard.compiled.intrinsics import view_array
from regard.compiled.matrix_formats import (
    BIAS,
    BLOCK,
    FORMAT,
    GROUP,
    GROUP_SCALES,
    GROUPS,
    INT8,
    LARGEST_FOR_PANELS,
    NUMBERS,
    PANEL_PAIRS,
    SCALES,
    SHORTS,
    SPAN,
)
from regard.compiled.register_tiles import LANES, SIZE
from regard.compiled.vectors import REASSOCIATED, ZERO
from regard.matmul.numba_dequantize import INT8_FACTOR, find_int4_factor, restore_int8, round_int4_groups
from regard.matmul.numba_quantized import find_quantization, store_integers
from regard.matmul.numba_row_tiles import (
    INT,
    INTS,
    PAIRS,
    SHORT,
    VECTOR,
    emit_pair_sums,
    emit_transposed,
    load_register,
    make_sums,
    repeat,
)

REGISTERS, VECTORS = 3, 8  # of a tile: their products fill 24 registers, with the pairs that they read 28
ROWS = REGISTERS * LANES  # of a panel
COLUMNS = 2 * PANEL_PAIRS
INT8_STEP = np.float32(2**15 / INT8_FACTOR)  # of an integer that a product of int8 and a scale is restored to
PANELS, MOST_VECTORS = 4, 512  # whose sums stay in the L2 cache, with the columns of the vectors that they read


@intrinsic
def transpose_pairs(context, rows, step, columns, panel):
    """Store pairs of numbers of LANES rows, `step` bytes apart, so that a panel has each pair of all rows in a register.

    columns is rounded up to whole registers. Both are addresses.
    """

    def generate(context, builder, signature, arguments):
        rows, step, columns, panel = arguments
        with cgutils.for_range_slice(builder, SIZE(0), columns, SIZE(2 * LANES)) as (p, _):
            here = builder.add(rows, builder.mul(p, SIZE(2)))
            places = [builder.add(here, builder.mul(step, SIZE(r))) for r in range(LANES)]
            block = [load_register(builder, place, INT, LANES) for place in places]
            to = builder.add(panel, builder.mul(p, SIZE(2 * ROWS)))
            for n, pairs in enumerate(emit_transposed(builder, block)):
                place = builder.add(to, SIZE(4 * ROWS * n))
                builder.store(pairs, builder.inttoptr(place, INTS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*4 * [types.int64]), generate


@intrinsic
def add_panel_products(context, vectors, size, count, panel, pairs, sums):
    """Add the products of a panel with vectors of 16-bit integers, `size` bytes apart, to float32 sums (count, ROWS).

    All are addresses, those of the vectors of their first column. Bounds are not checked.
    """

    def generate(context, builder, signature, arguments):
        vectors, size, count, panel, pairs, sums = arguments
        done, several = SIZE(0), VECTORS
        while several:
            end = builder.sub(count, builder.urem(count, SIZE(several)))
            with cgutils.for_range_slice(builder, done, end, SIZE(several)) as (one, _):
                starts = [builder.add(vectors, builder.mul(size, builder.add(one, SIZE(v)))) for v in range(several)]
                emit_panel_tile(builder, starts, panel, pairs, builder.add(sums, builder.mul(one, SIZE(4 * ROWS))))
            done, several = end, several // 2
        return context.get_dummy_value()

    return types.void(*6 * [types.int64]), generate


def emit_panel_tile(builder, vectors, panel, pairs, out):
    """Emit the products of a panel with some vectors, and add them to their sums."""
    sums = [make_sums(builder, INTS, REGISTERS) for _ in vectors]
    with cgutils.for_range(builder, pairs) as loop:
        here = builder.add(panel, builder.mul(loop.index, SIZE(4 * ROWS)))
        rows = [load_register(builder, builder.add(here, SIZE(4 * LANES * n)), SHORT, 2 * LANES) for n in range(REGISTERS)]
        for start, totals in zip(vectors, sums, strict=True):
            place = builder.inttoptr(builder.add(start, builder.mul(loop.index, SIZE(4))), INT.as_pointer())
            pair = builder.bitcast(repeat(builder, builder.load(place, align=4), LANES), PAIRS)
            for row, total in zip(rows, totals, strict=True):
                new = emit_pair_sums(builder, builder.load(total), pair, row)
                builder.store(new, total)
    for v, totals in enumerate(sums):
        for n, total in enumerate(totals):
            place = builder.inttoptr(builder.add(out, SIZE(4 * (ROWS * v + LANES * n))), VECTOR.as_pointer())
            new = builder.fadd(builder.load(place, align=4), builder.sitofp(builder.load(total), VECTOR))
            builder.store(new, place, align=4)


@njit_inlined(fastmath=REASSOCIATED)
def store_outputs(sums, factor, scales, bias, out):
    """Set the outputs of a vector to its sums times its factor and the scales of the rows, plus their bias if there is one."""
    for r in range(len(out)):
        out[r] = sums[r] * (factor * scales[r]) + (bias[r] if len(bias) else ZERO)


@njit_inlined()
def quantize_for_panels(x, one, count, integers):
    """Quantize one of several vectors to integers up to LARGEST_FOR_PANELS; return their scale, NaN if one is not finite.

    The columns of a panel of all vectors follow one another, then those of the next.
    """
    factor, scale = find_quantization(x, LARGEST_FOR_PANELS)
    places, padded = integers.reshape(-1), integers.shape[1] // SHORTS * BLOCK
    for column in range(0, padded, COLUMNS):
        some = min(COLUMNS, padded - column)
        start = count * column + some * one
        store_integers(x[column : column + some], factor, places[start : start + some])
    return scale


@njit_inlined()
def find_panel_scales(matrix, width, first, last, scales, factors):
    """Set the scales of the integers that some rows are restored to, and of int4 the factors by which it becomes them."""
    for row in range(first, last):
        if matrix[FORMAT] == INT8:
            scales[row - first] = view_array(matrix[SCALES], last, np.float32)[row] * INT8_STEP
        else:
            found = find_int4_factor(matrix[SCALES] + width // GROUP * 4 * row, width)
            factors[row - first], scales[row - first] = found


@njit_inlined()
def restore_columns(matrix, width, row, start, columns, factor, out):
    """Store some columns of a row as 16-bit integers at an address."""
    if matrix[FORMAT] == INT8:
        groups = matrix[GROUP_SCALES] + (width + SPAN - 1) // SPAN * GROUPS * row + start // SPAN * GROUPS
        restore_int8(matrix[NUMBERS] + width * row + start, groups, columns, out)
    else:
        pairs, scales = matrix[NUMBERS] + width // 2 * row, matrix[SCALES] + width // GROUP * 4 * row
        round_int4_groups(pairs, scales, width, start // GROUP, (start + columns) // GROUP, factor, out)


@njit_inlined()
def restore_panel(matrix, width, first, last, column, columns, factors, rows, panel):
    """Restore columns of up to ROWS rows as a panel, by way of a buffer of rows."""
    for row in range(first, last):
        restore_columns(matrix, width, row, column, columns, factors[row - first], rows[row - first].ctypes.data)
    for r in range(0, ROWS, LANES):
        transpose_pairs(rows[r].ctypes.data, 2 * COLUMNS, columns, panel.ctypes.data + 4 * r)


@njit_inlined()
def multiply_panels(matrix, columns, integers, factors, first, last, out):
    """Set out[v, row] = matrix[row] x[v] + bias[row] for the rows from first to last.

    The vectors are integers and their scales, which `quantize_for_panels` computes.
    """
    count, padded = out.shape[0], integers.shape[1] // SHORTS * BLOCK
    width = columns if matrix[FORMAT] == INT8 else padded
    restored, panel = np.zeros((ROWS, COLUMNS), np.int16), np.empty((PANEL_PAIRS, ROWS), np.uint32)
    scales, steps = np.zeros((PANELS, ROWS), np.float32), np.zeros((PANELS, ROWS), np.float32)
    sums = np.empty((PANELS, min(count, MOST_VECTORS), ROWS), np.float32)
    for start in range(0, count, MOST_VECTORS):
        several = min(MOST_VECTORS, count - start)
        for group in range(first, last, PANELS * ROWS):
            panels = min(PANELS, (last - group + ROWS - 1) // ROWS)
            for n in range(panels):
                row = group + ROWS * n
                find_panel_scales(matrix, width, row, min(row + ROWS, last), scales[n], steps[n])
            sums[:panels] = ZERO
            for column in range(0, width, COLUMNS):
                some, stored = min(COLUMNS, width - column), min(COLUMNS, padded - column)
                vectors = integers.ctypes.data + 2 * (count * column + stored * start)
                for n in range(panels):
                    row = group + ROWS * n
                    restore_panel(matrix, width, row, min(row + ROWS, last), column, some, steps[n], restored, panel)
                    add_panel_products(vectors, 2 * stored, several, panel.ctypes.data, (some + 1) // 2, sums[n].ctypes.data)
            for n in range(panels):
                store_panel(matrix, sums[n], factors, scales[n], start, start + several, group + ROWS * n, last, out)


@njit_inlined()
def store_panel(matrix, sums, factors, scales, start, end, row, last, out):
    """Store the outputs of a panel, whose first row is given, for the vectors from start to end."""
    bias, stop = view_array(matrix[BIAS], out.shape[1], np.float32), min(row + ROWS, last)
    here = bias[row:stop] if len(bias) else bias
    for one in range(start, end):
        store_outputs(sums[one - start], factors[one], scales, here, out[one, row:stop])
