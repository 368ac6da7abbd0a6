"""Columns: long arrays of integers on disk, .npy files that are written incrementally and verified when first read."""

import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from regard.errors import DataError

Numbers = NDArray[np.integer]
LONGEST_HEADER = 1 << 16  # most bytes of a header, by the format
DTYPES = ("<u2", "<u4", "<i4", "<i8")


@dataclass(frozen=True)
class Column:
    """The description of a file of integers: name, dtype, count, bytes, and checksum."""

    name: str
    dtype: str
    count: int
    size: int
    crc32: int  # of the numbers, followed by the header

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or Path(self.name).name != self.name or self.name in ("", ".."):
            raise ValueError(f"a file of numbers must be in the folder, got {self.name!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.name} must have numbers of {', '.join(DTYPES)}; got {self.dtype!r}")
        if not all(isinstance(one, int) and 0 <= one < 1 << 62 for one in (self.count, self.size, self.crc32)):
            raise ValueError(f"{self.name} must state its count, its size and its checksum; got {self.count!r}, {self.size!r}")
        if not 0 < self.size - self.count * np.dtype(self.dtype).itemsize <= LONGEST_HEADER:
            raise ValueError(f"{self.name} cannot have {self.count:,} numbers of {self.dtype} in {self.size:,} bytes")

    def check_size(self, folder: Path) -> None:
        """Raise DataError if the file is missing or does not have the size that was written."""
        path = folder / self.name
        if not path.is_file():
            raise DataError(f"{path} is missing, but is part of this corpus: prepare it again.")
        if path.stat().st_size != self.size:
            raise DataError(
                f"{path} has {path.stat().st_size:,} bytes, but was written with {self.size:,}: it is cut short or altered. "
                "Prepare the corpus again."
            )

    def open_verified(self, folder: Path) -> Numbers:
        """Return the numbers, memory-mapped; raise DataError if they are not those that were written."""
        path = folder / self.name
        self.check_size(folder)
        start = self.size - self.count * np.dtype(self.dtype).itemsize
        try:
            numbers: Numbers = np.memmap(path, self.dtype, "r", start, (self.count,)).view(np.ndarray)  # slices faster
            with path.open("rb") as file:
                found = crc32(file.read(start), crc32(numbers.data))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
        if found != self.crc32:
            raise DataError(
                f"{path} is damaged or altered: its checksum is {found:08x}, but was {self.crc32:08x} when written. "
                "Prepare the corpus again."
            )
        return numbers


class ColumnWriter:
    """A column that is being written."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype, self.count, self.crc32 = path, dtype, 0, 0
        self._file = path.open("xb")
        self._file.write(make_npy_header(dtype, 0))

    def append(self, numbers: Numbers) -> None:
        """Append numbers to the file."""
        data = np.ascontiguousarray(numbers, np.dtype(self.dtype))
        self._file.write(data.data)
        self.crc32 = crc32(data.data, self.crc32)
        self.count += len(data)

    def close(self) -> Column:
        """Write the final header, flush the file to disk, and return its description."""
        size, beginning = self._file.tell(), make_npy_header(self.dtype, self.count)
        self._file.seek(0)
        self._file.write(beginning)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Column(self.path.name, self.dtype, self.count, size, crc32(beginning, self.crc32))

    def abandon(self) -> None:
        """Close the file, which is then incomplete."""
        self._file.close()


def make_npy_header(dtype: str, count: int) -> bytes:
    """Return the header of a .npy file; numpy pads it, so that it has the same length for any count."""
    out = io.BytesIO()
    npy.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": (count,)})
    return out.getvalue()
