"""A writer of TensorFlow checkpoints, for the tests: the sorted table, the messages in it, and the data file."""

import struct
from pathlib import Path

import google_crc32c
import numpy as np

TYPES = {"float32": 1, "float64": 2, "int64": 9, "float16": 19}


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def mask_checksum(data: bytes) -> int:
    checksum = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def table(entries: dict[bytes, bytes], in_block: int = 16, restart: int = 4) -> bytes:
    """The file of a sorted table; every restart-th key of a block is written in full."""
    keys, out, index = sorted(entries), b"", {}
    for first in range(0, len(keys), in_block):
        part = keys[first : first + in_block]
        content = block([(key, entries[key]) for key in part], restart)
        index[part[-1]] = varint(len(out)) + varint(len(content))
        out += append_checksum(content)
    places = []
    for content in (block([], restart), block(sorted(index.items()), 1)):
        places.append(varint(len(out)) + varint(len(content)))
        out += append_checksum(content)
    return out + b"".join(places).ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def block(entries: list[tuple[bytes, bytes]], restart: int) -> bytes:
    out, before, restarts = b"", b"", []
    for n, (key, value) in enumerate(entries):
        if n % restart == 0:
            restarts.append(len(out))
            before = b""
        shared = next((i for i, (x, y) in enumerate(zip(before, key, strict=False)) if x != y), min(len(before), len(key)))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    restarts = restarts or [0]
    return out + struct.pack(f"<{len(restarts)}I", *restarts) + struct.pack("<I", len(restarts))


def append_checksum(content: bytes) -> bytes:
    return content + b"\0" + struct.pack("<I", mask_checksum(content + b"\0"))


def entry(array: np.ndarray, offset: int) -> bytes:
    data = array.tobytes()
    sizes = b"".join(message(2, number(1, size)) for size in array.shape)
    head = number(1, TYPES[array.dtype.name]) + message(2, sizes) + number(4, offset) + number(5, len(data))
    return head + varint(6 << 3 | 5) + struct.pack("<I", mask_checksum(data))


def write(folder: Path, arrays: dict[str, np.ndarray], entries_in_block: int = 16) -> None:
    data, entries = bytearray(), {b"": number(1, 1) + message(3, number(1, 1))}
    for name, array in sorted(arrays.items()):
        entries[name.encode()] = entry(array, len(data))
        data += array.tobytes()
    (folder / "model.ckpt.index").write_bytes(table(entries, entries_in_block))
    (folder / "model.ckpt.data-00000-of-00001").write_bytes(data)
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\nall_model_checkpoint_paths: "model.ckpt"\n')
