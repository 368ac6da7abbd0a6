"""A tensor that still lies in its file, and its way into memory: some rows at a time, straight into the dtype wanted.

What is read passes through one small buffer, so that loading takes the memory of what is loaded and little more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedIOBase, BytesIO
from pathlib import Path

import google_crc32c
import torch
from torch import Tensor

from regard.errors import RegardError, WeightsError

BUFFER = 1 << 23  # bytes
REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a file: its name there, its shape and dtype, and a way to its bytes, the rows one after the other.

    The dtype is a word where the file's is none of torch's, or none of weights.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    open: Callable[[], BufferedIOBase]
    checksum: int | None = None  # crc32c of the bytes, where the file states it
    swapped: bool = False  # whether the bytes of a number stand in the other order

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"

    def rows(self, width: int) -> Iterator[Tensor]:
        """The numbers in order, (r, width), r as many as fit the buffer. WeightsError where they end early, or are damaged."""
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
                        checksum = google_crc32c.extend(checksum, bytes(view))
                    numbers = torch.frombuffer(view, dtype=torch.uint8)
                    if self.swapped:
                        numbers = numbers.view(-1, self.dtype.itemsize).flip(-1).view(-1)
                    yield numbers.view(self.dtype).view(rows, width)
                    left -= rows
        except RegardError:
            raise
        except Exception as error:  # a damaged file makes its parser raise anything
            raise WeightsError(f"{self} is damaged or cut short: {reason_of(error)}.") from None
        if self.checksum not in (None, checksum):
            raise WeightsError(f"{self} is damaged: its checksum is {checksum:08x}, the file states {self.checksum:08x}.")

    def fill(self, targets: Sequence[Tensor], turned: bool = False) -> None:
        """Copies the numbers into tensors that lie in them side by side, along the first axis, or turned along the last."""
        matrices = [target if target.dim() == 2 else target[:, None] for target in targets]
        width = sum(map(len, matrices)) if turned else matrices[0].shape[1]
        row = 0
        for block in self.rows(width):
            if turned:
                for matrix, part in zip(matrices, block.split([len(matrix) for matrix in matrices], -1), strict=True):
                    matrix[:, row : row + len(block)] = part.T
            else:
                spread(block, row, matrices)
            row += len(block)

    def same(self, other: "Stored") -> bool:
        """Whether another tensor of this shape is the same, number for number."""
        if self.open is other.open or self.dtype != other.dtype:
            return self.dtype == other.dtype
        return self.dtype in REAL and all(torch.equal(a, b) for a, b in zip(self.rows(1), other.rows(1), strict=True))


def read_into(file: BufferedIOBase, view: memoryview) -> None:
    """Fill the view from a file; EOFError where that ends before."""
    if file.readinto(view) < len(view):
        raise EOFError("the file ends before its last number")


def allocate(shape: tuple[int, ...], dtype: torch.dtype, source: object) -> Tensor:
    """Return memory for a tensor; WeightsError where there is not enough."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:
        size = torch.Size(shape).numel() * dtype.itemsize
        raise WeightsError(f"{source} has a tensor of the shape {shape}: there is no memory for its {size:,} bytes.") from None


def reason_of(error: Exception) -> str:
    """Return what another library's error says, in one line without its full stop; its class where it says nothing."""
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__


def spread(block: Tensor, row: int, matrices: Sequence[Tensor]) -> None:
    """Copies rows, of which the first is the row-th, into the matrices that lie one below the other."""
    for matrix in matrices:
        first, last = max(row, 0), min(row + len(block), len(matrix))
        if first < last:
            matrix[first:last] = block[first - row : last - row]
        row -= len(matrix)


def matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, without the first axis that OpenAI's matrices (1, in, out) have."""
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def part_of(path: Path, start: int) -> Callable[[], BufferedIOBase]:
    """A way to a place in a file."""

    def opened() -> BufferedIOBase:
        file = path.open("rb")
        file.seek(start)
        return file

    return opened


def held(tensor: Callable[[], Tensor]) -> Callable[[], BufferedIOBase]:
    """A way to the bytes of a tensor that comes into memory as a whole."""

    def opened() -> BufferedIOBase:
        return BytesIO(tensor().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    return opened
