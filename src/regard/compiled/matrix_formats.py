"""The formats of a matrix that compiled products read, and the numbers and addresses that describe one.

int8 has a scale for each row. int4 stores blocks of BLOCK numbers from -8 to 7: byte n of a block holds number n in its low
half and number n + GROUP in its high half; a row of such a matrix is padded to full blocks, and each GROUP has a scale.
"""

import torch
from torch import Tensor

FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = FORMATS = range(5)
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.int8: INT8, torch.uint8: INT4}
GROUP, BLOCK = 32, 64
MATRIX_FIELDS = ("numbers", "scales", "bias", "largest", "format")  # of a matrix: addresses, 0 for none, and its format
NUMBERS, SCALES, BIAS, LARGEST, FORMAT, FIELDS = range(6)  # their places, and their number


def pad_columns(columns: int) -> int:
    """Return the number of columns with the padding to full blocks."""
    return -(-columns // BLOCK) * BLOCK


def describe_matrix(parts: list[Tensor | None]) -> list[int]:
    """Return the fields of a matrix: the addresses of its numbers, scales, bias and largest integer, and its format."""
    numbers = parts[NUMBERS]
    assert numbers is not None
    return [*(0 if x is None else x.data_ptr() for x in parts), DTYPES[numbers.dtype]]
