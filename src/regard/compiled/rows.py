# mypy: ignore-errors
"""Some rows of a matrix times a few vectors, as fast as the memory gives the rows."""

from numba import njit

from regard.compiled.pointers import fetch
from regard.compiled.vectors import ONE, ZERO, dot

AHEAD, LINE = 2, 64  # rows after this one, whose bytes are asked for, so many at a time, while this one is multiplied


@njit
def multiply_rows(x, first, last, matrix, scales, bias, out):
    """out[v, row] = scales[row] matrix[row] x[v] + bias[row]; there may be no scales and no bias."""
    size, start = matrix.shape[1] * matrix.itemsize, matrix.ctypes.data
    for row in range(first, last):
        for place in range(0, size, LINE):
            fetch(start + (row + AHEAD) * size + place)
        scale = scales[row] if len(scales) else ONE
        added = bias[row] if len(bias) else ZERO
        for one in range(len(x)):
            out[one, row] = dot(matrix[row], x[one]) * scale + added
