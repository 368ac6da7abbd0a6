"""Check the layout of a .gguf file before transformers reads it, because its reader trusts the counts in a file.

The format has no checksum: an altered weight is not detected, but every count, name and offset must be consistent with the
file. Source: docs/gguf.md of https://github.com/ggml-org/ggml, and ggml-common.h for the blocks.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import RegardError, WeightsError
from regard.weights.stored_tensor import describe_error

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY, UINT32 = 8, 9, 4
AXES, LONGEST_NAME = 4, 1 << 16
BYTES = {  # bytes of a block, by its number of elements and the type of the tensor
    1: {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2},
    32: {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17},
    64: {40: 36},
    128: {41: 18},
    256: {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98, 19: 50, 21: 110, 22: 82, 23: 136}
    | {29: 56, 34: 54, 35: 66},
}
MANY = 2**31  # more than any model has of anything
RANGES = {  # the least and the largest value of a setting, by its name without the architecture
    "context_length": (1, MANY),
    "embedding_length": (1, MANY),
    "vocab_size": (1, MANY),
    "attention.head_count": (0, MANY),  # 0 of a model without attention
    "attention.head_count_kv": (0, MANY),
    "attention.key_length": (1, MANY),
    "attention.layer_norm_epsilon": (1e-30, 1.0),
    "attention.layer_norm_rms_epsilon": (1e-30, 1.0),
    "rope.freq_base": (1e-30, 1e30),
}
BLOCKS = {kind: (numbers, size) for numbers, sizes in BYTES.items() for kind, size in sizes.items()}


class TensorEntry(NamedTuple):
    """A tensor of the file: its type, its axes in the file's order, and the offset of its bytes in the data section."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """The number of bytes of the tensor."""
        numbers, size = BLOCKS[self.kind]
        if not self.shape or prod(self.shape) == 0 or self.shape[0] % numbers:
            raise ValueError(f"{self.name} has the shape {self.shape}, which does not fit blocks of {numbers}")
        return prod(self.shape) // numbers * size


class Cursor:
    """A position in a file, which advances with everything that is read; raises EOFError beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def skip(self, size: int) -> None:
        """Advance by a number of bytes."""
        self.at += size
        if self.at > len(self.data):
            raise EOFError("it ends before its last setting")

    def read_number(self, code: str) -> Any:
        """Read a number, given its struct format code."""
        start = self.at
        self.skip(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.data, start)[0]

    def read_text(self) -> str:
        """Read a short text."""
        length, start = self.read_number("Q"), self.at
        if length > LONGEST_NAME:
            raise ValueError(f"a name has {length:,} bytes")
        self.skip(length)
        return self.data[start : self.at].decode("utf-8")


def read_layout(path: Path) -> list[TensorEntry]:
    """Return the tensors of a .gguf file; raise WeightsError if its counts, names or offsets are inconsistent with the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_tensors(Cursor(data))
    except RegardError:
        raise
    except Exception as error:
        raise WeightsError(f"{path} is damaged or not a .gguf file: {describe_error(error)}.") from None


def read_tensors(cursor: Cursor) -> list[TensorEntry]:
    """Return the tensors of a file after checking it from its first byte to its last."""
    cursor.skip(4)
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := cursor.read_number("I")) not in (2, 3):
        raise ValueError(f"its version is {version}; regard reads 2 and 3")
    count, settings = cursor.read_number("Q"), {}
    for _ in range(cursor.read_number("Q")):
        name = cursor.read_text()
        if name in settings:
            raise ValueError(f"it gives {name} twice")
        settings[name] = read_setting(cursor)
    tensors = list(read_tensor_entries(cursor, count))
    kind, alignment = settings.get("general.alignment", (UINT32, 32))
    if kind != UINT32 or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment}")
    check_settings({name.partition(".")[2]: (name, number) for name, (_, number) in settings.items()}, count)
    check_offsets(cursor, tensors, alignment)
    return tensors


def check_settings(settings: Mapping[str, tuple[str, float | None]], count: int) -> None:
    """Raise ValueError if a number of a model cannot be; they are by their names without the architecture."""
    for key, (least, most) in (RANGES | {"block_count": (1, count)}).items():
        name, number = settings.get(key, ("", None))
        if number is not None and not least <= number <= most:  # NaN is not either
            raise ValueError(f"its {name} is {number:,}, where {least:,} to {most:,} is expected")
    width, heads = (settings.get(key, ("", None))[1] for key in ("embedding_length", "attention.head_count"))
    if width and heads and width % heads and "attention.key_length" not in settings:
        raise ValueError(f"its {heads} heads do not divide its width, {width}")


def read_setting(cursor: Cursor) -> tuple[int, Any]:
    """Return the type of a setting and its value, None if it is no single number."""
    kind = cursor.read_number("I")
    if kind in SCALARS:
        return kind, cursor.read_number(SCALARS[kind])
    inner, count = (TEXT, 1) if kind == TEXT else (cursor.read_number("I"), cursor.read_number("Q"))
    if kind not in (TEXT, ARRAY) or inner not in (TEXT, *SCALARS):
        raise ValueError(f"a setting has the type {kind} of {inner}")
    if inner == TEXT:
        for _ in range(count):
            cursor.skip(cursor.read_number("Q"))
    else:
        cursor.skip(count * struct.calcsize(f"<{SCALARS[inner]}"))
    return kind, None


def read_tensor_entries(cursor: Cursor, count: int) -> Iterator[TensorEntry]:
    """Yield the name, type, shape and offset of each tensor; raise ValueError for a repeated name or an unknown type."""
    names = set()
    for _ in range(count):
        name, axes = cursor.read_text(), cursor.read_number("I")
        if name in names or axes > AXES:
            raise ValueError(f"{name} is given twice or has {axes:,} axes")
        names.add(name)
        shape = tuple(cursor.read_number("Q") for _ in range(axes))
        tensor = TensorEntry(name, cursor.read_number("I"), shape, cursor.read_number("Q"))
        if tensor.kind not in BLOCKS:
            raise ValueError(f"{name} has the type {tensor.kind}, which is unknown")
        yield tensor


def check_offsets(cursor: Cursor, tensors: list[TensorEntry], alignment: int) -> None:
    """Raise ValueError unless the tensors are consecutive, aligned, and end with the file."""
    start, end, expected = -(-cursor.at // alignment) * alignment, 0, 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset != expected:
            raise ValueError(f"{tensor.name} begins at byte {tensor.offset:,}, where {expected:,} is expected")
        end, expected = expected + tensor.size, expected + -(-tensor.size // alignment) * alignment
    if len(cursor.data) not in (start + end, start + expected):
        raise ValueError(f"it has {len(cursor.data):,} bytes, but its last tensor ends at {start + end:,}")
