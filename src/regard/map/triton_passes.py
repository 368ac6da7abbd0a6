"""The traversal of matrices on a GPU, compiled by Triton: the fast version of what passes.py gathers for an overview.

All matrices of a map go through it together. A product of float32 is exact to its last bits (see PRECISION), one of half
precision is exact, and sums are in float32. If Triton is not installed, or a map has additive scores, float64, a compact bias
or a NaN, passes.py is used instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from regard.map.passes import ROWS, TraversalResult
from regard.map.plane import Denominators, Plane
from regard.map.pooling import BinnedWeights
from regard.mechanism.mask_algebra import find_key_ranges
from regard.mechanism.request import Request

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # numbers of a query
LARGEST_TABLE = 2**31  # bytes of a mask that has no range of keys for each query
SUM_NUMBERS = 2**25  # of the sums of columns of blocks of rows, held at a time: 128 MiB, and as much for the largest
NAMES = ("shift", "total", *ROWS)
TILE, KEYS_OF_TILE, WARPS = 64, 64, 4  # rows and keys whose scores are computed at a time, and the warps that do
MOST_OF_BIN, NUMBERS_OF_BINS = 256, 2048  # keys of a bin of the picture that are added at a time, and of several bins
PRECISION = "tf32x3"  # float32 as two numbers of 11 bits: a product is off by at most 3 · 2⁻²⁴ of its size, 2⁻²⁴ by itself
NARROWEST = 16  # rows, keys and numbers of a query in the product of a tile, at least


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


def can_run_triton(plane: Plane) -> bool:
    """Return whether the Triton kernels apply to this plane."""
    request = plane.request
    is_supported = request.q.is_cuda and request.q.dtype == request.k.dtype and request.q.dtype in DTYPES
    has_plain_scores = request.weight is None and (request.bias is None or type(request.bias) is Tensor)
    return is_supported and has_plain_scores and min(*plane.shape) > 0 and 0 < request.q.shape[3] <= WIDEST and has_triton()


def gather_statistics(
    planes: Sequence[Plane], rows: Tensor, columns: Tensor
) -> list[tuple[TraversalResult, BinnedWeights]] | None:
    """Compute all row statistics, the sums of columns, the denominators and the picture of planes of one request.

    rows and columns are the edges of the picture's bins. The rows cover all queries or a run of them, to which all results are
    then restricted. Return None if there is a NaN, which comparisons would lose, or if the mask's table is too large.
    """
    inputs = make_inputs(planes)
    if inputs is None:
        return None
    first, last = int(rows[0]), int(rows[-1])
    found = summarize_rows(inputs, first, last)
    if not found[:2].isfinite().all():
        return None
    edges = rows.to(found.device), columns.to(found.device)
    answers: list[tuple[TraversalResult, BinnedWeights]] = []
    for received, total, largest in sum_columns(inputs, found, rows, columns):
        statistics = dict(zip(NAMES, found[:, len(answers)], strict=True))
        below = Denominators(statistics.pop("shift"), statistics.pop("total"))
        picture = BinnedWeights.from_sums(*edges, total, largest)
        answers.append((TraversalResult(statistics, received, below), picture))
    return answers


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """What both kernels take: the tensors, their strides, and the settings of the scores."""

    request: Request
    pairs: Tensor  # (n, 2), int64: batch row and head of each matrix
    ranges: tuple[Tensor, Tensor]  # first and stop key of each query, (b or 1, q), int32
    table: Tensor | None  # (b or 1, h or 1, q or 1, k or 1), bool

    @property
    def tensors(self) -> list[Tensor]:
        """q, k, bias and table; any tensor in place of what is missing."""
        request = self.request
        bias, table = (request.q if x is None else x for x in (request.bias, self.table))
        return [request.q, request.k, bias, table]

    @property
    def numbers(self) -> list[int | float]:
        """The strides of the tensors, then the numbers that the kernels take after them, up to the first query."""
        request, low = self.request, self.ranges[0]
        strides = [*request.q.stride(), *request.k.stride()]
        for x in (request.bias, self.table):
            strides += [0] * 4 if x is None else [n if size > 1 else 0 for n, size in zip(x.stride(), x.shape, strict=True)]
        return [*strides, low.stride(0) if len(low) > 1 else 0, request.q.shape[1] // request.k.shape[1]]

    @property
    def settings(self) -> list[int | float]:
        """The numbers of keys and of numbers of each, the scale, the softcap, and how many matrices there are."""
        request = self.request
        return [request.k.shape[2], request.q.shape[3], request.scale, request.softcap or 0.0, len(self.pairs)]

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        request = self.request
        return {
            "has_softcap": request.softcap is not None,
            "has_bias": request.bias is not None,
            "has_table": self.table is not None,
            "padded_width": max(NARROWEST, 1 << (request.q.shape[3] - 1).bit_length()),
            "precision": PRECISION,
            "tile_keys": KEYS_OF_TILE,
            "num_warps": WARPS,
        }


def make_inputs(planes: Sequence[Plane]) -> KernelInputs | None:
    """Return the input of the kernels for planes of one request, or None if its mask takes too large a table."""
    request = planes[0].request
    device, (q, k) = request.q.device, planes[0].shape
    pairs = torch.tensor([(plane.b, plane.h) for plane in planes], device=device)
    offset = request.offset if isinstance(request.offset, int) else request.offset.expand(request.q.shape[0]).tolist()
    ranges, table = find_key_ranges(request.mask, q, k, offset), None
    if ranges is None:
        if request.mask.batch * request.mask.heads * q * k > LARGEST_TABLE:
            return None
        table = request.mask.block(torch.arange(q, device=device), torch.arange(k, device=device), request.offset)
        ranges = torch.zeros(1, q, dtype=torch.int32), torch.full((1, q), k, dtype=torch.int32)
    low, high = (x.to(device) for x in ranges)
    return KernelInputs(request, pairs, (low, high), table)


def get_offsets(inputs: KernelInputs) -> Tensor:
    """Return the position of the first query of each matrix among the keys, (n,)."""
    request = inputs.request
    offsets = torch.as_tensor(request.offset, device=request.q.device)
    return offsets.expand(request.q.shape[0])[inputs.pairs[:, 0]].contiguous()


def summarize_rows(inputs: KernelInputs, first: int, last: int) -> Tensor:
    """Compute the denominators and statistics of the queries first to last of each matrix, (9, n, last - first)."""
    from regard.map.compiled import triton_kernels

    request, units, count = inputs.request, len(inputs.pairs), last - first
    found = torch.empty(len(NAMES), units, count, device=request.q.device)
    sinks = request.q if request.sinks is None else request.sinks.float()[inputs.pairs[:, 1]].contiguous()
    grid = -(-count // TILE), units
    if count:
        triton_kernels.summarize_rows[grid](
            *inputs.tensors, *inputs.ranges, sinks, inputs.pairs, get_offsets(inputs), found,
            *inputs.numbers, first, count, *inputs.settings,
            has_sinks=request.sinks is not None, tile_rows=TILE, **inputs.constants,
        )  # fmt: skip
    return found


def sum_columns(inputs: KernelInputs, found: Tensor, rows: Tensor, columns: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield of each matrix the sums of its columns, (k,), and the sums and the largest of the weights in the picture's bins."""
    device, k = found.device, inputs.request.k.shape[2]
    starts, stops, owners = list_row_blocks(rows)
    group = max(1, min(len(inputs.pairs), SUM_NUMBERS // k))
    for begin in range(0, len(inputs.pairs), group):
        some = replace(inputs, pairs=inputs.pairs[begin : begin + group])
        units, step = len(some.pairs), max(1, SUM_NUMBERS // (k * group))
        received = torch.zeros(units, k, dtype=torch.float64, device=device)
        total = torch.zeros(len(rows) - 1, units, len(columns) - 1, dtype=torch.float64, device=device)
        largest = torch.zeros(total.shape, device=device)
        for i in range(0, len(starts), step):
            bounds = starts[i : i + step].to(device), stops[i : i + step].to(device)
            sums, most = sum_columns_of_blocks(some, found[:, begin : begin + group], int(rows[0]), *bounds)
            received += sums.sum(0, dtype=torch.float64)
            own = owners[i : i + step].to(device)
            pooled, highest = pool_columns(sums, most, columns)
            total.index_add_(0, own, pooled)
            largest.scatter_reduce_(0, own.view(-1, 1, 1).expand_as(highest), highest, "amax")
        yield from zip(received.float(), total.transpose(0, 1), largest.transpose(0, 1), strict=True)


def sum_columns_of_blocks(
    inputs: KernelInputs, found: Tensor, first: int, starts: Tensor, stops: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the sum and the largest of the weights of each key over blocks of rows, (blocks, n, k)."""
    from regard.map.compiled import triton_kernels

    blocks, units, k = len(starts), len(inputs.pairs), inputs.request.k.shape[2]
    sums, largest = torch.zeros(2, blocks, units, k, device=found.device)
    shift, total = found[:2].contiguous()
    triton_kernels.sum_columns[blocks, units](
        *inputs.tensors, *inputs.ranges, inputs.pairs, shift, total, starts, stops, sums, largest,
        *inputs.numbers, first, found.shape[2], *inputs.settings,
        tile_rows=max(NARROWEST, 1 << (int((stops - starts).max()) - 1).bit_length()), **inputs.constants,
    )  # fmt: skip
    return sums, largest


def pool_columns(sums: Tensor, largest: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the sum, in float64, and the largest of the numbers (..., k) in each bin of keys, given the bins' edges."""
    from regard.map.compiled import triton_kernels

    (*axes, k), bins = sums.shape, len(edges) - 1
    total = torch.empty(*axes, bins, dtype=torch.float64, device=sums.device)
    most = torch.empty(*axes, bins, device=sums.device)
    widest = int(edges.diff().max())
    width = min(MOST_OF_BIN, 1 << max(widest - 1, 0).bit_length())
    together = max(1, NUMBERS_OF_BINS // width)
    triton_kernels.pool_columns[sums.shape[:-1].numel(), -(-bins // together)](
        sums, largest, edges.to(sums.device), total, most, k, bins, widest, tile_bins=together, tile_keys=width, num_warps=WARPS
    )
    return total, most


def list_row_blocks(edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """List blocks of at most TILE rows, none across an edge of the bins of rows: their starts, stops, and bins, (n,) each."""
    sizes = edges.diff()
    pieces = -(-sizes // TILE)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), pieces)
    place = torch.arange(len(owner)) - (pieces.cumsum(0) - pieces)[owner]
    starts, stops = (edges[owner] + n * sizes[owner] // pieces[owner] for n in (place, place + 1))
    return starts, stops, owner
