"""A tensor in a file, read as a whole and converted into the requested dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard.errors import RegardError, WeightsError

REAL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file: its name there, shape and dtype, and a function that reads its numbers, in row-major order.

    The dtype is a string if it is none of torch's, or none of weights.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    read: Callable[[], Tensor]

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"

    def load(self) -> Tensor:
        """Read the tensor. Raises WeightsError if its numbers are damaged or too few."""
        try:
            return self.read().reshape(self.shape)
        except RegardError:
            raise
        except Exception as error:  # the parser of a damaged file may raise anything
            raise WeightsError(f"{self} is damaged or cut short: {describe_error(error)}.") from None

    def copy_into(self, targets: Sequence[Tensor], turned: bool = False) -> None:
        """Copy the numbers into tensors that are stored side by side, along the first axis or, transposed, along the last."""
        whole = self.load()
        parts = (whole.T if turned else whole).split([len(target) for target in targets])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)

    def is_equal(self, other: "StoredTensor") -> bool:
        """Return whether another tensor of this shape is equal, number for number."""
        return self.dtype == other.dtype and self.dtype in REAL_DTYPES and torch.equal(self.load(), other.load())


def read_numbers(path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype | str) -> Tensor:
    """Read the numbers of a tensor from a position of a file on. Raises EOFError if the file ends before the last."""
    assert isinstance(dtype, torch.dtype)
    size = torch.Size(shape).numel() * dtype.itemsize
    found = np.fromfile(path, np.uint8, size, offset=start)
    if len(found) < size:
        raise EOFError("the file ends before its last number")
    return torch.from_numpy(found).view(dtype)


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


def drop_leading_axis(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape, without the first axis of OpenAI's matrices (1, in, out)."""
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
