"""CRC-32 of tensors and of their header, to detect an altered file.

zlib-ng computes the values of the standard library's zlib at the speed of memory.
"""

import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

BLOCK = 2**22  # bytes per task of a thread


def compute_checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the CRC-32 of each tensor: that of the CRC-32s of its 4 MiB blocks, in order, each 4 bytes, little-endian."""
    found: dict[str, int] = {}
    with ThreadPoolExecutor(max(torch.get_num_threads(), 1)) as threads:
        for name, x in tensors.items():
            data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            blocks = threads.map(crc32, (data[start : start + BLOCK] for start in range(0, len(data), BLOCK)))
            found[name] = crc32(b"".join(struct.pack("<I", one) for one in blocks))
    return found


def compute_header_checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of the metadata and of every tensor's name, dtype and shape."""
    shapes = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in sorted(tensors)]
    return str(crc32(json.dumps([sorted(metadata.items()), shapes]).encode()))


def find_altered_tensor(tensors: Mapping[str, Tensor], expected: Any) -> str | None:
    """Return the name of the first tensor whose CRC-32 differs from the expected one; None if there is none.

    Raises ValueError if tensors and checksums have different names.
    """
    came = compute_checksums(tensors)
    if not isinstance(expected, dict) or expected.keys() != came.keys():
        raise ValueError("its tensors and its checksums have different names")
    return next((name for name in came if came[name] != expected[name]), None)
