"""The formats of a matrix that compiled products read, and the numbers and addresses that describe one.

int8 has a float32 scale for each row, times an integer from 0 to 255 for each of its groups, GROUPS in each SPAN of columns:
column c of a span is in group c % (2 GROUPS) // 2. A lane of a register, which holds the products of two neighbors, then has
one scale for the whole span. int4 stores blocks of BLOCK numbers from -8 to 7: byte n of a block holds number n in its low half
and number n + GROUP in its high half; a row of such a matrix is padded to full blocks. Each GROUP of a row has a scale and an
offset, to which its integers times the scale are added: scales (rows, 2, groups). Source: Q4_1 of llama.cpp.
"""

import torch
from torch import Tensor

FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = FORMATS = range(5)
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.int8: INT8, torch.uint8: INT4}
GROUP, BLOCK = 32, 64  # of int4
GROUPS, SPAN = 16, 768  # of int8
LARGEST = 32767  # largest integer of a quantized vector
LARGEST_RESTORED = 1365  # of a row restored to integers: the SPAN / 16 products in a lane of 16 stay below 2**31
PANEL_PAIRS, LARGEST_FOR_PANELS = 96, 8191  # columns / 2 of a panel of restored rows; a sum of its products stays below 2**31
TILE_COLUMNS = 32  # of a row of bfloat16 that a tile register (AMX) holds
SHORTS = BLOCK + 2 * BLOCK // GROUP  # 16-bit numbers for a block of a quantized vector, with the sum of each group in float32
MATRIX_FIELDS = ("numbers", "scales", "bias", "group_scales", "format")  # of a matrix: addresses, 0 for none, and its format
NUMBERS, SCALES, BIAS, GROUP_SCALES, FORMAT, FIELDS = range(6)  # their places, and their number


def pad_columns(columns: int) -> int:
    """Return the number of columns with the padding to full blocks."""
    return -(-columns // BLOCK) * BLOCK


def count_shorts(columns: int) -> int:
    """Return the 16-bit numbers that a quantized vector takes, with its padding and the sums of its groups."""
    return pad_columns(columns) // BLOCK * SHORTS


def count_group_scales(columns: int) -> int:
    """Return the number of integers that scale the groups of a row of int8."""
    return -(-columns // SPAN) * GROUPS


def describe_matrix(parts: list[Tensor | None]) -> list[int]:
    """Return the fields of a matrix: the addresses of its numbers, scales, bias and scales of groups, and its format."""
    numbers = parts[NUMBERS]
    assert numbers is not None
    return [*(0 if x is None else x.data_ptr() for x in parts), DTYPES[numbers.dtype]]
