# mypy: ignore-errors
"""Some rows of a matrix times a few vectors, as fast as the rows can be read from memory."""

from numba import njit

from regard.compiled.intrinsics import prefetch_line
from regard.compiled.vectors import ONE, ZERO, dot

AHEAD, LINE = 2, 64  # rows to prefetch ahead of the one that is multiplied, and bytes of a cache line


@njit
def multiply_rows(x, first, last, matrix, scales, bias, out):
    """Set out[v, row] = scales[row] matrix[row] x[v] + bias[row] for the rows from first to last.

    scales and bias may be empty, for factors of 1 and no bias.
    """
    size, start = matrix.shape[1] * matrix.itemsize, matrix.ctypes.data
    for row in range(first, last):
        for place in range(0, size, LINE):
            prefetch_line(start + (row + AHEAD) * size + place)
        scale = scales[row] if len(scales) else ONE
        added = bias[row] if len(bias) else ZERO
        for one in range(len(x)):
            out[one, row] = dot(matrix[row], x[one]) * scale + added
