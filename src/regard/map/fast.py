"""The traversals of a matrix on a CPU, in float32, compiled by numba: the twins of `passes.py` and `products.py`.

Where numba is not installed, a map is not float32 on a CPU, or there is a NaN in it, those do the same. So they do for additive
scores, which take so long that nothing else matters, and are compiled themselves: see `additive.py`. What is large goes through
numpy here, on one thread: after a parallel step of torch its other threads would stay awake for some milliseconds, on the cores
that these passes are about to use.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.compiled import processor
from regard.map import plans
from regard.map.passes import ROWS, Gathered
from regard.map.plane import Denominators, Plane
from regard.map.pooling import Picture

LARGEST = 256  # rows of a bin that one thread takes
SMALL = 2**19  # scores that are not worth a second thread
MOST = 64  # of the largest of a row that are found by holding them in order
NAMES = ("shift", "total", *ROWS)
Answer = TypeVar("Answer")


def suits(plane: Plane) -> bool:
    """Whether this plane can go through the compiled passes."""
    plain = plane.q.dtype == torch.float32 and plane.q.device.type == "cpu" and plane.weight is None
    return plain and min(*plane.shape, plane.q.shape[-1]) > 0 and processor.has_numba()


def each(planes: Sequence[Plane], work: Callable[[Plane, int], Answer]) -> list[Answer]:
    """work(plane, threads) of every plane: of many side by side, each on one thread, of few one after the other on all."""
    threads = torch.get_num_threads()
    if threads == 1 or len(planes) < 4 * threads:
        return [work(plane, threads) for plane in planes]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda plane: work(plane, 1), planes))


def gather(plane: Plane, threads: int, rows: Tensor, columns: Tensor) -> tuple[Gathered, Picture] | None:
    """All row statistics, the sum of each column, the denominators and the picture of a plane, in one traversal.

    rows and columns are where the bins of the picture begin, and the last one ends; the columns hold all keys, the rows all
    queries or a run of them, of which then everything is. None where there is a NaN, of which comparisons lose sight.
    """
    q, k = plane.shape
    bins = Bins(rows, columns)
    found, received = np.zeros((len(NAMES), q), np.float32), np.zeros((threads, k))
    first, last = int(rows[0]), int(rows[-1])
    given = bins.own, bins.columns, found, Each(received), bins.total, bins.most
    walk(plane, "overview", bins.edges, threads, *given, part=((first, last), (0, k)))
    found = found if last - first == q else found[:, first:last].copy()  # a view would keep the rows of all alive
    if not np.isfinite(found[:2]).all():
        return None
    statistics = dict(zip(NAMES, torch.from_numpy(found), strict=True))
    below = Denominators(statistics.pop("shift"), statistics.pop("total"))
    summed = torch.from_numpy(received.sum(0).astype(np.float32))
    return Gathered(statistics, summed, below), bins.picture()


def picture(plane: Plane, threads: int, below: Denominators, rows: Tensor, columns: Tensor) -> Picture | None:
    """The picture of a part of a plane, given the denominators of all rows; None where there is a NaN."""
    bins = Bins(rows, columns)
    known = torch.stack([below.shift, below.total]).numpy()
    if not np.isfinite(known).all():
        return None
    received = np.zeros((threads, plane.shape[1]))
    part = (int(rows[0]), int(rows[-1])), (int(columns[0]), int(columns[-1]))
    walk(plane, "picture", bins.edges, threads, bins.own, bins.columns, known, Each(received), bins.total, bins.most, part=part)
    return bins.picture()


def top(plane: Plane, threads: int, n: int) -> tuple[Tensor, Tensor] | None:
    """The n largest weights of each row and their keys, (q, n); None where there is a NaN."""
    q = plane.shape[0]
    found, values, keys = np.zeros((len(NAMES), q), np.float32), np.zeros((q, n), np.float32), np.zeros((q, n), np.int64)
    walk(plane, "top", np.arange(0, q, plans.RUN), threads, found, values, keys)
    return (torch.from_numpy(values), torch.from_numpy(keys)) if np.isfinite(found[:2]).all() else None


def mixed(plane: Plane, threads: int, v: Tensor) -> Tensor | None:
    """A v, for v (k, e) in float32; None where there is a NaN in A."""
    q, e = plane.shape[0], v.shape[1]
    packed = plans.panels(v.numpy())
    found, out = np.zeros((len(NAMES), q), np.float32), np.zeros((q, len(packed) * packed.shape[2]), np.float32)
    walk(plane, "forward", np.arange(0, q, plans.RUN), threads, found, packed, out)
    return torch.from_numpy(out)[:, :e] if np.isfinite(found[:2]).all() else None


def returned(plane: Plane, threads: int, r: Tensor) -> Tensor | None:
    """Aᵀ r, for r (q, e) in float32; None where there is a NaN in A."""
    (q, k), e = plane.shape, r.shape[1]
    keys, width = (-(-n // plans.columns()) * plans.columns() for n in (k, e))
    padded = np.zeros((q, width), np.float32)
    padded[:, :e] = r.numpy()
    found, out = np.zeros((len(NAMES), q), np.float32), np.zeros((threads, keys, width), np.float32)
    walk(plane, "backward", np.arange(0, q, plans.RUN), threads, found, padded, Each(out))
    return torch.from_numpy(out.sum(0))[:k, :e] if np.isfinite(found[:2]).all() else None


class Each(list[Any]):
    """Arrays of which each thread takes its own."""


def walk(
    plane: Plane, name: str, edges: "plans.Integers", threads: int, *arguments: Any, part: plans.Part | None = None
) -> None:
    """A compiled pass over the blocks of a plane, none of which is across an edge; the rest is what the pass takes."""
    from regard.map.compiled import walks

    scores, function = plans.scores(plane), getattr(walks, name)
    threads = threads if plane.shape[0] * plane.shape[1] > SMALL else 1
    for plan in plans.plans(plane, part):
        blocks = plans.blocks(plan, edges)
        given = plan, scores._replace(bias=plans.bias(plane, plan)), blocks

        def work(n: int, given: Any = given) -> None:
            function(*given, n, threads, *(x[n] if isinstance(x, Each) else x for x in arguments))

        side_by_side(work, threads)


def side_by_side(work: Callable[[int], None], parts: int) -> None:
    """Does each part of a work in a thread of its own."""
    if parts == 1:
        return work(0)
    with ThreadPoolExecutor(parts - 1) as others:
        waiting = [others.submit(work, part) for part in range(1, parts)]
        work(0)
        for one in waiting:
            one.result()
    return None


class Bins:
    """The bins of a picture, with more rows of them where theirs are too large for a thread."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        self.rows, self.given, self.columns = rows, columns, columns.numpy()
        starts = rows.numpy()
        sizes = np.diff(starts)
        pieces = (sizes + LARGEST - 1) // LARGEST
        self.owner = np.repeat(np.arange(len(sizes)), pieces)  # of each row of bins here, the one asked for
        place = np.arange(len(self.owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        inner = starts[self.owner] + place * sizes[self.owner] // pieces[self.owner]
        self.edges: plans.Integers = np.append(inner, starts[-1])
        self.own = np.zeros(starts[-1], np.int64)  # the row of bins of each query
        self.own[starts[0] :] = np.repeat(np.arange(len(self.owner)), np.diff(self.edges))
        self.total = np.zeros((len(self.owner), len(columns) - 1))
        self.most = np.zeros((len(self.owner), len(columns) - 1), np.float32)

    def picture(self) -> Picture:
        """What has been found, in the bins asked for."""
        total, most = self.total, self.most
        present, first = np.unique(self.owner, return_index=True)
        if len(present) < max(len(self.owner), len(self.rows) - 1):
            total, most = (np.zeros((len(self.rows) - 1, x.shape[1]), x.dtype) for x in (total, most))
            if len(present):
                total[present], most[present] = np.add.reduceat(self.total, first), np.maximum.reduceat(self.most, first)
        return Picture.found(self.rows, self.given, torch.from_numpy(total), torch.from_numpy(most))
