"""A tensor in a file, read some rows at a time, directly into the requested dtype.

Reading uses one small buffer, so that loading takes little more memory than the loaded tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedIOBase, BytesIO
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import RegardError, WeightsError
from regard.weights.sorted_table import import_crc32c

BUFFER = 1 << 23  # bytes read at a time
REAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file: its name there, shape and dtype, and a function that opens its bytes, in row-major order.

    The dtype is a string if it is none of torch's, or none of weights.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    open: Callable[[], BufferedIOBase]
    checksum: int | None = None  # crc32c of the bytes, if the file has one

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"

    def read_rows(self, width: int) -> Iterator[Tensor]:
        """Yield the numbers in order, (r, width), r as fits the buffer. Raises WeightsError if they are damaged or too few."""
        assert isinstance(self.dtype, torch.dtype)
        left, size = torch.Size(self.shape).numel() // max(width, 1), width * self.dtype.itemsize
        buffer, checksum = bytearray(size * max(1, min(left, BUFFER // max(size, 1)))), 0
        try:
            with self.open() as file:
                while left:
                    rows = min(left, len(buffer) // size)
                    view = memoryview(buffer)[: rows * size]
                    read_into(file, view)
                    if self.checksum is not None:
                        checksum = import_crc32c().extend(checksum, bytes(view))
                    yield torch.frombuffer(view, dtype=self.dtype).view(rows, width)
                    left -= rows
        except RegardError:
            raise
        except Exception as error:  # the parser of a damaged file may raise anything
            raise WeightsError(f"{self} is damaged or cut short: {describe_error(error)}.") from None
        if self.checksum not in (None, checksum):
            raise WeightsError(f"{self} is damaged: its checksum is {checksum:08x}, the file states {self.checksum:08x}.")

    def copy_into(self, targets: Sequence[Tensor], turned: bool = False) -> None:
        """Copy the numbers into tensors that are stored side by side, along the first axis or, transposed, along the last."""
        matrices = [target if target.dim() == 2 else target[:, None] for target in targets]
        width = sum(map(len, matrices)) if turned else matrices[0].shape[1]
        row = 0
        for block in self.read_rows(width):
            if turned:
                for matrix, part in zip(matrices, block.split([len(matrix) for matrix in matrices], -1), strict=True):
                    matrix[:, row : row + len(block)] = part.T
            else:
                copy_rows(block, row, matrices)
            row += len(block)

    def is_equal(self, other: "StoredTensor") -> bool:
        """Return whether another tensor of this shape is equal, number for number."""
        if self.open is other.open or self.dtype != other.dtype:
            return self.dtype == other.dtype
        return self.dtype in REAL_DTYPES and all(
            torch.equal(a, b) for a, b in zip(self.read_rows(1), other.read_rows(1), strict=True)
        )


def read_into(file: BufferedIOBase, view: memoryview) -> None:
    """Fill the view from a file; raise EOFError if the file ends before."""
    if file.readinto(view) < len(view):
        raise EOFError("the file ends before its last number")


def allocate_tensor(shape: tuple[int, ...], dtype: torch.dtype, source: object) -> Tensor:
    """Allocate a tensor; raise WeightsError if there is not enough memory."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:
        size = torch.Size(shape).numel() * dtype.itemsize
        raise WeightsError(f"{source} has a tensor of the shape {shape}: there is no memory for its {size:,} bytes.") from None


def describe_error(error: Exception) -> str:
    """Return the message of another library's error, in one line without its full stop; its class name if there is none."""
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__


def copy_rows(block: Tensor, row: int, matrices: Sequence[Tensor]) -> None:
    """Copy rows, the first of which is the row-th, into matrices that are stacked along the first axis."""
    for matrix in matrices:
        first, last = max(row, 0), min(row + len(block), len(matrix))
        if first < last:
            matrix[first:last] = block[first - row : last - row]
        row -= len(matrix)


def drop_leading_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape, without the first axis of OpenAI's matrices (1, in, out)."""
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def make_file_opener(path: Path, start: int) -> Callable[[], BufferedIOBase]:
    """Return a function that opens a file at a position."""

    def open_file() -> BufferedIOBase:
        file = path.open("rb")
        file.seek(start)
        return file

    return open_file


def make_memory_opener(tensor: Callable[[], Tensor]) -> Callable[[], BufferedIOBase]:
    """Return a function that opens the bytes of a tensor that is loaded as a whole."""

    def open_memory() -> BufferedIOBase:
        return BytesIO(tensor().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    return open_memory
