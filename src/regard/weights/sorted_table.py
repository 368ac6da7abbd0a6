"""Read LevelDB's sorted table, the format of a TensorFlow checkpoint's index: keys and values, in blocks.

Source: doc/table_format.md of https://github.com/google/leveldb; TensorFlow's code is in tensorflow/core/lib/io.
"""

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from regard.errors import WeightsError

FOOTER, MAGIC = 48, 0xDB4775248B80FB57
MASK = 0xA282EAD8  # added to a rotated checksum, so that data with embedded checksums can be checksummed
LARGEST = 1 << 28  # bytes; the index of the largest GPT-2 has about 40,000


def read_entries(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield every key and value. Raises ValueError or struct.error for a file that is no such table or a wrong checksum."""
    if path.stat().st_size > LARGEST:
        raise ValueError("it is too large for an index")
    data = path.read_bytes()
    if len(data) < FOOTER or struct.unpack("<Q", data[-8:])[0] != MAGIC:
        raise ValueError("its last bytes are not those of a sorted table")
    footer = data[-FOOTER:]
    at = 0
    for _ in range(2):  # the location of other blocks, which TensorFlow does not write
        _, at = read_varint(footer, at)
    for _, handle in parse_entries(read_block(data, footer, at)):
        yield from parse_entries(read_block(data, handle, 0))


def read_block(data: bytes, handle: bytes, at: int) -> bytes:
    """Return the block that a handle points to, after verifying its checksum."""
    start, at = read_varint(handle, at)
    length, _ = read_varint(handle, at)
    end = start + length
    if end + 5 > len(data):
        raise ValueError("a block lies beyond its end")
    kind, checksum = struct.unpack_from("<BI", data, end)
    if import_crc32c().value(data[start : end + 1]) != unmask_checksum(checksum):
        raise ValueError(f"the checksum of its block at byte {start} does not match")
    if kind:
        raise ValueError("its blocks are compressed, which TensorFlow's are not")
    return data[start:end]


def parse_entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block; each key stores the number of bytes that it shares with the previous one."""
    (restarts,) = struct.unpack("<I", data[-4:])
    end, at, key = len(data) - 4 * (restarts + 1), 0, b""
    while at < end:
        shared, at = read_varint(data, at)
        suffix_length, at = read_varint(data, at)
        length, at = read_varint(data, at)
        if shared > len(key) or at + suffix_length + length > end:
            raise ValueError("an entry lies beyond its block")
        key = key[:shared] + data[at : at + suffix_length]
        at += suffix_length
        yield key, data[at : at + length]
        at += length


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a whole number of seven bits per byte, the lowest first; return it and the position after it."""
    number = shift = 0
    while shift < 64:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
    raise ValueError("a number of more than ten bytes")


@cache
def import_crc32c() -> ModuleType:
    """Return the module that computes CRC-32C, the checksum of TensorFlow's files; WeightsError if it is not installed."""
    try:
        import google_crc32c
    except ImportError:
        raise WeightsError(
            'the checksums of a TensorFlow checkpoint are CRC-32C, which needs google-crc32c: pip install "regard[tensorflow]".'
        ) from None
    return google_crc32c


def unmask_checksum(checksum: int) -> int:
    """Return the crc32c of a masked one."""
    sum_bits = (checksum - MASK) & 0xFFFFFFFF
    return (sum_bits >> 17 | sum_bits << 15) & 0xFFFFFFFF
