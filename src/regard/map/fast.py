"""The traversal of a matrix on a CPU, in float32, compiled by numba: the twin of what `passes.gather` finds for an overview.

torch multiplies a run of queries with the keys, and one pass over each row of scores, while it is in the cache, leaves
every statistic behind. Where numba is not installed, or a map is not float32 on a CPU, `passes.py` does the same.
"""

import functools
import importlib.util
import math
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from regard.map.passes import ROWS, Gathered
from regard.map.plane import BLOCK_NUMBERS, MOST_ROWS, Denominators, Plane
from regard.map.pooling import Picture


def suits(plane: Plane) -> bool:
    """Whether this plane can go through the compiled pass: its comparisons would lose a NaN."""
    plain = plane.q.dtype == torch.float32 and plane.q.device.type == "cpu" and min(plane.shape) > 0
    return (
        plain and installed() and all(math.isfinite(x.sum().item()) for x in (plane.q, plane.k)) and plane.request.bias is None
    )


@functools.cache
def installed() -> bool:
    """Whether numba is there."""
    return importlib.util.find_spec("numba") is not None


def kernel() -> ModuleType:
    """The compiled pass, imported when it is first needed."""
    from regard.map import compiled

    return compiled


def gather(plane: Plane, rows: Tensor, columns: Tensor) -> tuple[Gathered, Picture]:
    """All row statistics, the sum of each column, the denominators and the picture of a plane, in one traversal.

    rows and columns are where the bins of the picture begin, and the last one ends; together they hold the whole matrix.
    """
    q, k = plane.shape
    size = len(rows) - 1, len(columns) - 1
    bins = (torch.searchsorted(rows, torch.arange(q), right=True) - 1).numpy()
    found = np.zeros((q, len(NAMES)), np.float32)
    threads = torch.get_num_threads()
    received = np.zeros(k)
    total, largest = np.zeros((threads, *size), np.float32), np.zeros((threads, *size), np.float32)
    sink = np.float32(-np.inf if plane.sink is None else float(plane.sink))
    room = torch.empty(max(min(BLOCK_NUMBERS, MOST_ROWS * k), k))
    for start, stop, ranges in plane.cuts():
        keys = plane.columns(ranges)
        scores = plane.masked_rows(start, stop, ranges, out=room)
        parts = torch.searchsorted(keys, columns).numpy()  # where each bin of columns begins among these keys
        mine = np.zeros((threads, len(keys)), np.float32)
        own = (start + plane.offset, sink, parts, bins[start:stop], found[start:stop])
        kernel().traverse(scores.numpy(), keys.float().numpy(), *own, mine, total, largest)
        received[keys.numpy()] += mine.sum(0)
    statistics = {name: torch.from_numpy(np.ascontiguousarray(found[:, n])) for n, name in enumerate(NAMES)}
    below = Denominators(statistics.pop("shift"), statistics.pop("total"))
    picture = Picture(plane, rows, columns)
    picture.sum.copy_(torch.from_numpy(total.sum(0, dtype=np.float64)))
    picture.max.copy_(torch.from_numpy(largest.max(0)))
    summed = torch.from_numpy(received.astype(np.float32))
    return Gathered({"logsumexp": below.logsumexp, **statistics}, summed, below), picture


NAMES = ("shift", "total", *(name for name in ROWS if name != "logsumexp"))
