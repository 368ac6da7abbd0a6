"""Memory of what recordings keep, taken again by the next one: to the system, a fresh page costs more than what fills it.

It lies apart from what the model takes and frees, whose blocks would otherwise lie between those that are kept, and be
given back to the system after every forward.
"""

import mmap
import weakref
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

LIMIT = 2**28  # bytes that wait to be taken again; what is more goes back to the system
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}  # Windows has no flags
FREE: dict[int, deque[mmap.mmap]] = {}  # blocks by size, the size that came back longest ago in front
LENT: dict[int, tuple["weakref.ref[Any]", mmap.mmap]] = {}  # by the id of the array that a block was lent as


def copied(x: Tensor) -> Tensor:
    """A contiguous copy of a tensor in memory that nobody else writes to."""
    if x.device.type != "cpu" or not x.nbytes:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    block = take(-(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    array = np.frombuffer(block, np.uint8, x.nbytes)
    LENT[id(array)] = weakref.ref(array, partial(give_back, id(array))), block
    return torch.from_numpy(array).view(x.dtype).view(x.shape).copy_(x)


def take(size: int) -> mmap.mmap:
    """A block of this many bytes, whatever they hold. Each step here is one that no other thread can cut in two."""
    try:
        return FREE[size].pop()
    except (IndexError, KeyError):
        return mmap.mmap(-1, size, **PRIVATE)


def give_back(key: int, _: object) -> None:
    """The block of an array that no tensor holds any more waits; of too many, those whose size came back longest ago go."""
    block = LENT.pop(key)[1]
    blocks = FREE.pop(len(block), deque())
    blocks.append(block)
    FREE[len(block)] = blocks
    for size, others in list(FREE.items()):
        while others and waiting() > LIMIT:
            others.popleft()
        if not others:
            FREE.pop(size, None)


def waiting() -> int:
    """Bytes that wait to be taken again."""
    return sum(size * len(blocks) for size, blocks in list(FREE.items()))
