"""Read OpenAI's own checkpoints without TensorFlow: hparams.json, checkpoint, model.ckpt.index and model.ckpt.data-*.

The index is a sorted table. Its first entry holds the number of data files; every other entry is keyed by the name of a tensor
and holds the location of its bytes and their checksum. Source: tensorflow/core/protobuf/tensor_bundle.proto.
"""

import re
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import RegardError, WeightsError
from regard.weights import sorted_table
from regard.weights.sorted_table import import_crc32c, read_varint, unmask_checksum
from regard.weights.stored_tensor import StoredTensor, describe_error, drop_leading_axis, read_numbers

DTYPES = {1: torch.float32, 2: torch.float64, 14: torch.bfloat16, 19: torch.float16}
INDEX = ".index"
BUFFER = 1 << 23  # bytes whose checksum is computed at a time
Fields = dict[int, list[int | bytes]]  # of a message, by field number


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder contains a TensorFlow checkpoint."""
    return (folder / "checkpoint").is_file() or any(folder.glob(f"*{INDEX}"))


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder's checkpoint."""
    index = find_index(folder)
    try:
        entries = dict(sorted_table.read_entries(index))
        header = parse_message(entries.pop(b""))
        files = list_data_files(index, get_number(header, 1, 1))
        if get_number(header, 2):
            raise ValueError("its numbers are big-endian")
        return {
            name.decode(): describe_tensor(index, files, name.decode(), parse_message(entry)) for name, entry in entries.items()
        }
    except RegardError:
        raise
    except Exception as error:  # the parser of a damaged index may raise anything
        raise WeightsError(
            f"{index} is damaged or not the index of a TensorFlow checkpoint: {describe_error(error)}."
        ) from None


def find_index(folder: Path) -> Path:
    """Return the index of the checkpoint that the file `checkpoint` names, or of the only one in the folder."""
    note = folder / "checkpoint"
    text = note.read_text("utf-8", "replace") if note.is_file() else ""
    stated_name = re.search(r'^model_checkpoint_path: "(?:.*[/\\])?([^/\\"\n]+)"', text, re.M)
    found = [folder / (stated_name[1] + INDEX)] if stated_name else sorted(folder.glob(f"*{INDEX}"))
    if len(found) != 1 or not found[0].is_file():
        names = ", ".join(path.name for path in found)
        raise WeightsError(f"{folder} must hold one TensorFlow checkpoint, or name it in a file `checkpoint`; found {names}.")
    return found[0]


def list_data_files(index: Path, count: int) -> list[Path]:
    """Return the data files of an index."""
    stem = index.name.removesuffix(INDEX)
    files = [index.with_name(f"{stem}.data-{number:05}-of-{count:05}") for number in range(min(count, 1000))]
    missing = next((file for file in files if not file.is_file()), None)
    if missing:
        raise WeightsError(f"{missing} is missing, but {index.name} refers to it.")
    return files


def describe_tensor(index: Path, files: list[Path], name: str, entry: Fields) -> StoredTensor:
    """Return a tensor, given its entry, in which 1 is dtype, 2 shape, 3 data file, 4 offset, 5 bytes, 6 checksum, 7 slices."""
    if 7 in entry:
        raise WeightsError(f"{index}: {name} is stored in slices, which OpenAI's checkpoints are not.")
    sizes = parse_message(get_bytes(entry, 2)).get(2, [])
    shape = tuple(get_number(parse_message(size), 1) for size in sizes if isinstance(size, bytes))
    dtype = DTYPES.get(get_number(entry, 1), f"TensorFlow's type {get_number(entry, 1)}")
    path, count = files[get_number(entry, 3)], torch.Size(shape).numel()
    if isinstance(dtype, torch.dtype) and count * dtype.itemsize != get_number(entry, 5):
        raise WeightsError(f"{index}: {name} has the shape {shape} but {get_number(entry, 5)} bytes.")
    if get_number(entry, 4) + get_number(entry, 5) > path.stat().st_size:
        raise WeightsError(f"{path} ends before the last number of {name}.")
    read = partial(read_verified, path, get_number(entry, 4), shape, dtype, unmask_checksum(get_number(entry, 6)))
    return StoredTensor(path, name, drop_leading_axis(shape), dtype, read)


def read_verified(path: Path, start: int, shape: tuple[int, ...], dtype: torch.dtype | str, stated: int) -> Tensor:
    """Read the numbers of a tensor. Raises ValueError if their checksum is not that of the file."""
    found, checksum = read_numbers(path, start, shape, dtype), 0
    for part in found.view(torch.uint8).split(BUFFER):
        checksum = import_crc32c().extend(checksum, part.numpy().tobytes())
    if checksum != stated:
        raise ValueError(f"its checksum is {checksum:08x}, the file states {stated:08x}")
    return found


def parse_message(message: bytes) -> Fields:
    """Return the fields of a protocol buffer message."""
    found: Fields = {}
    for number, value in iterate_fields(message):
        found.setdefault(number, []).append(value)
    return found


def iterate_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field: varints, bytes, and four or eight bytes as a whole number."""
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = read_varint(message, at)
            yield key >> 3, value
        elif kind in (1, 5):
            (value,) = struct.unpack_from("<Q" if kind == 1 else "<I", message, at)
            at += 8 if kind == 1 else 4
            yield key >> 3, value
        elif kind == 2:
            length, at = read_varint(message, at)
            yield key >> 3, message[at : at + length]
            at += length
        else:
            raise ValueError(f"a field of the wire type {kind}")


def get_number(entry: Fields, number: int, default: int = 0) -> int:
    """Return a whole number of a message; 0 by default if it is not stored."""
    value = entry.get(number, [default])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {number} is not a number")
    return value


def get_bytes(entry: Fields, number: int) -> bytes:
    """Return the bytes of a message's field."""
    value = entry.get(number, [b""])[-1]
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is not a message")
    return value
