"""The traversals of a matrix on a CPU, in float32, compiled by numba: the fast versions of passes.py and weight_products.py.

If numba is not installed, a map is not float32 on a CPU, or it has a NaN, those two are used instead;
for additive scores too, whose own cost dominates, and which are compiled in `additive.py`. Large arrays are handled by numpy
here, on one thread: after a parallel operation of torch its other threads would spin for some milliseconds, on the cores that
these passes are about to use.
"""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.compiled import processor
from regard.compiled.threads import run_callback
from regard.map import pass_inputs
from regard.map.attribution_passes import EntryStatistics, Products
from regard.map.pass_runner import PerThread, count_parts, run_batch, run_pass
from regard.map.passes import ROWS, AppliedWeights, TraversalResult
from regard.map.picture_bins import PictureBins, cover_keys
from regard.map.plane import BLOCK_NUMBERS, Denominators, Plane
from regard.map.pooling import BinnedWeights, SignedPicture, choose_larger
from regard.map.weight_sums import MEANS, SMALLEST_VARIANCE, SumRequest, WeightSums
from regard.mechanism.mask_algebra import EVERYTHING, Offset
from regard.mechanism.request import Request
from regard.mechanism.scores import score_dtype

SMALL_BATCH = 2**15  # scores of small matrices up to which one thread is used: those of OpenMP start quickly
MOST = 64  # largest n of `top`, which keeps a sorted list for each row
NAMES = ("shift", "total", *ROWS)


def can_run_compiled(plane: Plane) -> bool:
    """Return whether the compiled passes apply to this plane; inside a transform of torch.func tensors have no data pointer."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    q = plane.request.q
    is_supported = score_dtype(q.dtype) == torch.float32 and q.device.type == "cpu" and plane.request.weight is None
    return is_supported and min(*plane.shape, q.shape[-1]) > 0 and processor.has_numba()


def gather_statistics(
    planes: Sequence[Plane], threads: int, rows: Tensor, columns: Tensor, names: Iterable[str] = ROWS
) -> tuple[TraversalResult, BinnedWeights, list[int]]:
    """Compute row statistics by name, the sum of each column, the denominators and the pictures of planes, in one traversal.

    All results are (n, ...). rows and columns are the edges of the picture's bins. The columns cover all keys; the rows cover
    all queries or a run of them, to which all results are then restricted. The last result lists the planes with a NaN, by
    place: comparisons lose it, and their results are not valid.
    """
    bins = PictureBins(rows, columns)
    total, most = bins.allocate(len(planes))
    no_means = np.zeros((0, *bins.shape), np.float32)
    found, wrong = traverse_planes(planes, threads, bins, names, total, most, no_means)
    return found, bins.make_pictures(total, most), wrong


def gather_overview(
    planes: Sequence[Plane], threads: int, rows: Tensor, columns: Tensor
) -> tuple[TraversalResult, Tensor, Tensor, list[int]] | None:
    """Compute what `gather_statistics` does, with the means and the largest weights of the bins instead of their sums.

    Return None if the matrices are so large that the rows of a bin may be in several parts.
    """
    bins, (q, k) = PictureBins(rows, columns), planes[0].shape
    if 2 * q * k > BLOCK_NUMBERS or not bins.is_whole:
        return None
    no_sums, shape = np.zeros((0, *bins.shape)), (len(planes), *bins.shape)
    most, means = np.empty(shape, np.float32), np.empty(shape, np.float32)
    found, wrong = traverse_planes(planes, threads, bins, ROWS, no_sums, most, means)
    return found, torch.from_numpy(means), torch.from_numpy(most), wrong


def traverse_planes(
    planes: Sequence[Plane],
    threads: int,
    bins: PictureBins,
    names: Iterable[str],
    *pictures: "pass_inputs.Floats | pass_inputs.Sums",
) -> tuple[TraversalResult, list[int]]:
    """Compute the statistics of the rows of bins, (n, ...), and the pictures; list the planes with a NaN.

    The pictures are the sums, the maxima and the means of the bins, written as by `traversals.overview`.
    """
    (q, k), units, parts = planes[0].shape, len(planes), count_parts(planes, threads)
    first, last = int(bins.edges[0]), int(bins.edges[-1])
    found, received = np.zeros((units, len(NAMES), q), np.float32), np.zeros((units, parts, k))
    arguments = bins.edges, bins.columns.numpy(), found, received
    run_batch(planes, "overview", bins.edges, threads, *arguments, *pictures, rows=(first, last))
    own = {name: torch.from_numpy(found[:, NAMES.index(name), first:last].copy()) for name in ("shift", "total", *names)}
    below = Denominators(own.pop("shift"), own.pop("total"))
    return TraversalResult(own, torch.from_numpy(received.sum(1).astype(np.float32)), below), find_wrong_planes(found)


def find_wrong_planes(found: "pass_inputs.Floats") -> list[int]:
    """List the planes, by place, whose denominators (n, NAMES, rows) are not all finite."""
    wrong: list[int] = np.flatnonzero(~np.isfinite(found[:, :2]).all((1, 2))).tolist()
    return wrong


def summarize_planes(
    request: Request, pairs: Tensor, has_weights: bool = False, sums: WeightSums | None = None, wanted: SumRequest | None = None
) -> dict[str, Tensor] | None:
    """Compute all row statistics (n, q) by name of small matrices, their column sums, "received", and their "weights".

    pairs (n, 2) are batch rows and heads. The sums of weights that are wanted are written to `sums`; the statistics are then
    (b, h, q), as these are. Return None if there is a NaN, which comparisons would lose.
    """
    from regard.map.compiled import small_planes

    (units, _), (b, h, q, width), (g, k) = pairs.shape, request.q.shape, request.k.shape[1:3]
    numbers = {"q": request.q.float(), "k": request.k.float()}
    allocate = numbers["q"].new_empty
    axes = (units,) if sums is None else sums.numbers.shape[1:]
    found, received, weights = (
        allocate(len(NAMES), *axes, q),
        allocate(*axes, k),
        allocate(units, q, k) if has_weights else None,
    )
    bias, sinks = (None if x is None else x.float().to_dense() for x in (request.bias, request.sinks))
    seen = None
    if request.mask != EVERYTHING:
        seen = request.mask.block(torch.arange(q, device="cpu"), torch.arange(k, device="cpu"), request.offset)
    tables = {name: None if x is None else x.expand(b, h, q, k) for name, x in (("bias", bias), ("seen", seen))}
    strided = {name: make_rows_contiguous(x) for name, x in (numbers | tables).items()}
    strides = (0 if x is None else x.stride(axis) for x in strided.values() for axis in (0, 1, 2))
    sizes = {"units": units, "share": h // g, "queries": q, "keys": k, "width": width, "statistics": len(NAMES)}
    done = run_callback(
        small_planes.summarize_planes,
        min(torch.get_num_threads(), units) if units * q * k > SMALL_BATCH else 1,
        **sizes,
        strides=(ctypes.c_int64 * 12)(*strides),
        pairs=pairs.contiguous(),
        positions=list_positions(request.offset, b, pairs),
        **strided,
        sinks=make_rows_contiguous(sinks),
        weights=weights,
        found=found,
        received=received,
        scale=request.scale,
        softcap=request.softcap or 0.0,
        **({} if sums is None or wanted is None else make_sum_arguments(sums, wanted)),
    )
    if done.has_nan or (sinks is not None and sinks.isnan().any()):
        return None
    if sums is not None:
        sums.has_blind_query = bool(done.has_blind_query)
    statistics = {**dict(zip(NAMES, found.unbind(), strict=True)), "received": received}
    return statistics if weights is None else {**statistics, "weights": weights}


def list_positions(offset: Offset, b: int, pairs: Tensor) -> Tensor:
    """Return the position of the first query of each pair (n, 2), by the offset of all batch rows or of each."""
    if isinstance(offset, int):
        return torch.full((len(pairs),), offset, dtype=torch.int64, device="cpu")
    return offset.expand(b)[pairs[:, 0]]


def make_sum_arguments(sums: WeightSums, wanted: SumRequest) -> dict[str, Any]:
    """Return the arguments of the compiled pass for sums of weights, which are written to `sums`."""
    places = {"by_query": sums.by_query, "numbers": sums.numbers, "is_stripe": sums.is_stripe, "heads": sums.numbers.shape[2]}
    return {**list_table_arguments(wanted), **places, "smallest": SMALLEST_VARIANCE, "mean_count": len(MEANS)}


def list_table_arguments(wanted: SumRequest) -> dict[str, Any]:
    """Return the arguments for the tables of a request: one that batch rows or heads share has strides of 0."""
    tables = {
        "counted": wanted.counted.contiguous(),
        "real": wanted.real.contiguous(),
        "heavy_counts": wanted.heavy.contiguous(),
        "visible": wanted.visible.contiguous(),
    }
    steps = (x.stride(axis) if x.shape[axis] > 1 else 0 for x in tables.values() for axis in (0, 1))
    return {
        **tables,
        "window": wanted.window,
        "sink": wanted.sink,
        "table_strides": (ctypes.c_int64 * 9)(*steps, wanted.visible.shape[-1]),
        "firsts": wanted.first,
        "has_shared_pairs": wanted.visible.shape[:2] == wanted.counted.shape[:2] == (1, 1),
    }


def make_rows_contiguous(x: Tensor | None) -> Tensor | None:
    """Return a tensor whose last axis has a stride of 1, and no pending negation, without a copy if it has."""
    return x if x is None else (x if x.stride(-1) == 1 else x.contiguous()).resolve_neg()


def draw_picture(plane: Plane, threads: int, below: Denominators, rows: Tensor, columns: Tensor) -> BinnedWeights | None:
    """Draw the picture of a part of a plane, given the denominators of all rows; return None if there is a NaN."""
    bins = PictureBins(rows, columns)
    known = torch.stack([below.shift, below.total]).numpy()
    if not np.isfinite(known).all():
        return None
    received = PerThread(np.zeros((threads, plane.shape[1])))
    part = (int(rows[0]), int(rows[-1])), (int(columns[0]), int(columns[-1]))
    total, most = bins.allocate(1)
    arguments = bins.edges, columns.numpy(), known, received, total[0], most[0]
    run_pass(plane, "picture", bins.edges, threads, *arguments, part=part)
    return bins.make_pictures(total, most)[0]


def gather_entries(plane: Plane, threads: int, products: Products, rows: Tensor, columns: Tensor) -> EntryStatistics | None:
    """Compute the sums, extremes and picture of an attribution map, of the rows of the picture; None if there is a NaN."""
    q, k = plane.shape
    padded, inner = cover_keys(columns, k)
    bins = PictureBins(rows, padded)
    total, most = bins.allocate(2)  # of the entries, and of the same times -1
    part = (int(rows[0]), int(rows[-1])), (0, k)
    found, received = np.zeros((len(NAMES), q), np.float32), np.zeros((threads, k))
    sums, extremes = np.zeros(q), np.zeros((2, q), np.float32)
    arguments = (
        pass_inputs.make_product_inputs(products, bins.edges),
        bins.edges,
        padded.numpy(),
        found,
        sums,
        extremes,
        PerThread(received),
    )
    run_pass(plane, "attribution", bins.edges, threads, *arguments, total[0], *most, part=part)
    if not (np.isfinite(found[:2]).all() and np.isfinite(sums).all()):
        return None
    row_sums, column_sums = (torch.from_numpy(x.astype(np.float32)) for x in (sums, received.sum(0)))
    largest, lowest = torch.from_numpy(extremes)
    total[1] = -total[0]
    pictures = bins.make_pictures(total, most)
    picture = SignedPicture(*(pictures[n].select_columns(inner) for n in range(2)))
    return EntryStatistics(row_sums, column_sums, choose_larger(largest, -lowest), picture)


def find_top(planes: Sequence[Plane], threads: int, n: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the n largest weights of each row of planes, their keys, (planes, q, n), and the planes with a NaN, by place."""
    units, q = len(planes), planes[0].shape[0]
    found, values = np.zeros((units, len(NAMES), q), np.float32), np.zeros((units, q, n), np.float32)
    keys = np.zeros((units, q, n), np.int64)
    run_batch(planes, "top", np.arange(0, q, pass_inputs.RUN), threads, found, values, keys)
    return torch.from_numpy(values), torch.from_numpy(keys), find_wrong_planes(found)


def apply_weights(plane: Plane, threads: int, v: Tensor) -> tuple[Tensor, Denominators] | None:
    """Compute A v for v (k, e) in float32, and the denominators; return None if there is a NaN in A."""
    found = apply_weights_with_statistics(plane, threads, v)
    return None if found is None else (found.product, found.denominators)


def apply_weights_with_statistics(
    plane: Plane, threads: int, v: Tensor, part: pass_inputs.Part | None = None, until: int = 0
) -> AppliedWeights | None:
    """Compute A v for v (k, e) in float32, with statistics; None if there is a NaN in A.

    Of a part these are of its rows, and the softmax is over its keys alone, whose ends must be multiples of the width of a
    panel. received has the sums of the weights of the rows before `until`.
    """
    (first, last), e = part[0] if part else (0, plane.shape[0]), v.shape[1]
    packed = pass_inputs.pack_panels(v.numpy())
    found, out = np.zeros((len(NAMES), last), np.float32), np.zeros((last, len(packed) * packed.shape[2]), np.float32)
    received, edges = np.zeros((threads, plane.shape[1] if until else 0)), np.arange(first, last, pass_inputs.RUN)
    run_pass(plane, "forward", edges, threads, found, packed, out, until, PerThread(received), part=part)
    if not np.isfinite(found[:2]).all():
        return None
    shift, total, distance = torch.from_numpy(found[[0, 1, NAMES.index("distance")], first:])
    summed = torch.from_numpy(received.sum(0).astype(np.float32))
    return AppliedWeights(torch.from_numpy(out)[first:, :e], Denominators(shift, total), distance, summed)


def apply_transposed_weights(plane: Plane, threads: int, r: Tensor) -> tuple[Tensor, Denominators] | None:
    """Compute Aᵀ r for r (q, e) in float32, and the denominators; return None if there is a NaN in A."""
    (q, k), e = plane.shape, r.shape[1]
    keys, width = (-(-n // pass_inputs.get_panel_width()) * pass_inputs.get_panel_width() for n in (k, e))
    is_narrow = 2 * e <= width
    padded = np.zeros((q, e if is_narrow else width), np.float32)
    padded[:, :e] = r.numpy()
    found, shape = np.zeros((len(NAMES), q), np.float32), (e, keys) if is_narrow else (keys, width)
    out, name = np.zeros((threads, *shape), np.float32), "backward_few" if is_narrow else "backward"
    run_pass(plane, name, np.arange(0, q, pass_inputs.RUN), threads, found, padded, PerThread(out))
    if not np.isfinite(found[:2]).all():
        return None
    product, below = torch.from_numpy(out.sum(0)), found[:2].copy()  # a view would keep all rows alive
    return (product.T if is_narrow else product)[:k, :e], Denominators(*torch.from_numpy(below))
