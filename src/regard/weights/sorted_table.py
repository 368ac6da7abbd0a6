"""The sorted table of LevelDB, in which TensorFlow writes the index of a checkpoint: keys to values, in blocks.

Source: doc/table_format.md of https://github.com/google/leveldb; TensorFlow keeps the format in tensorflow/core/lib/io.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import google_crc32c

FOOTER, MAGIC = 48, 0xDB4775248B80FB57
MASK = 0xA282EAD8  # added to a rotated checksum, so that a checksum of checksums is sound
LARGEST = 1 << 28  # bytes; the index of GPT-2's largest takes some 40,000


def read(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Every key and value. ValueError, or struct.error, where the file is no such table or a checksum does not fit."""
    if path.stat().st_size > LARGEST:
        raise ValueError("it is too large for an index")
    data = path.read_bytes()
    if len(data) < FOOTER or struct.unpack("<Q", data[-8:])[0] != MAGIC:
        raise ValueError("its last bytes are not those of a sorted table")
    footer = data[-FOOTER:]
    at = 0
    for _ in range(2):  # where other blocks are, which TensorFlow writes none of
        _, at = varint(footer, at)
    for _, handle in entries(block(data, footer, at)):
        yield from entries(block(data, handle, 0))


def block(data: bytes, handle: bytes, at: int) -> bytes:
    """The block that a handle points to, its checksum verified."""
    start, at = varint(handle, at)
    length, _ = varint(handle, at)
    end = start + length
    if end + 5 > len(data):
        raise ValueError("a block lies beyond its end")
    kind, checksum = struct.unpack_from("<BI", data, end)
    if google_crc32c.value(data[start : end + 1]) != unmasked(checksum):
        raise ValueError(f"the checksum of its block at byte {start} does not fit")
    if kind:
        raise ValueError("its blocks are compressed, which TensorFlow's are not")
    return data[start:end]


def entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block; a key says how many bytes it shares with the one before."""
    (restarts,) = struct.unpack("<I", data[-4:])
    end, at, key = len(data) - 4 * (restarts + 1), 0, b""
    while at < end:
        shared, at = varint(data, at)
        fresh, at = varint(data, at)
        length, at = varint(data, at)
        if shared > len(key) or at + fresh + length > end:
            raise ValueError("an entry lies beyond its block")
        key = key[:shared] + data[at : at + fresh]
        at += fresh
        yield key, data[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number of seven bits a byte, the lowest first, and the place after it."""
    number = shift = 0
    while shift < 64:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
    raise ValueError("a number of more than ten bytes")


def unmasked(checksum: int) -> int:
    """The crc32c that was masked."""
    rotated = (checksum - MASK) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF
