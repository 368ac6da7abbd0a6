"""The traversal of matrices on a GPU, compiled by Triton: the fast version of what passes.py gathers for an overview.

All matrices of a map go through it together. A product of float32 is exact to its last bits (see PRECISION), one of half
precision is exact, and sums are in float32. If Triton is not installed or cannot compile here, or a map has additive scores,
float64, a compact bias or a NaN, passes.py is used instead.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.map.passes import ROWS, TraversalResult
from regard.map.plane import Denominators, Plane
from regard.map.pooling import BinnedWeights
from regard.map.small_maps import select_offsets
from regard.mechanism.mask_algebra import find_key_ranges
from regard.mechanism.request import Request

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256  # numbers of a query
LARGEST_OFFSET = 2**30  # of a query's position among the keys, so that positions are whole numbers of 32 bits
TABLE_BYTES = 2**29  # of a mask without one range of keys for each query, of all matrices that are traversed together
TABLE_BLOCK = 2**24  # entries of it that are computed at a time, in several temporary tensors of 64 bits
SUM_NUMBERS = 2**25  # of the sums of columns of blocks of rows, held at a time: 128 MiB, and as much for the largest
NAMES = ("shift", "total", *ROWS)
WARPS = 4
MOST_OF_BIN, NUMBERS_OF_BINS = 256, 2048  # keys of a bin of the picture that are added at a time, and of several bins
PRECISION = "tf32x3"  # float32 as two numbers of 11 bits: a product is off by at most 4 · 2⁻²⁴ of its size, not by 2⁻²⁴
NARROWEST = 16  # rows, keys and numbers of a query in the product of a tile, at least

Traversals = list[tuple[TraversalResult, BinnedWeights]]


class Tile(NamedTuple):
    """How many rows and keys have their scores computed at a time, and in how many stages keys are loaded ahead."""

    rows: int
    keys: int
    stages: int


TILES = ((256, Tile(64, 64, 3)), (512, Tile(64, 32, 1)), (1024, Tile(32, 32, 1)))  # by most bytes of a query: 96 KiB shared
broken_devices: set[torch.device] = set()  # on which the kernels could not be compiled or launched


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, for a GPU whose products it can compute as PRECISION says."""
    return find_spec("triton") is not None and torch.version.hip is None


def can_run_triton(plane: Plane) -> bool:
    """Return whether the Triton kernels apply to this plane."""
    request = plane.request
    is_supported = request.q.is_cuda and request.q.dtype == request.k.dtype and request.q.dtype in DTYPES
    has_plain_scores = request.weight is None and (request.bias is None or type(request.bias) is Tensor)
    fits = min(*plane.shape) > 0 and 0 < request.q.shape[3] <= WIDEST and abs(plane.offset) <= LARGEST_OFFSET
    return is_supported and has_plain_scores and fits and has_triton() and request.q.device not in broken_devices


def gather_statistics(planes: Sequence[Plane], rows: Tensor, columns: Tensor) -> Traversals | None:
    """Compute all row statistics, the sums of columns, the denominators and the picture of planes of one request.

    rows and columns are the edges of the picture's bins. The rows cover all queries or a run of them, to which all results are
    then restricted. Return None if there is a NaN, which comparisons would lose, if the mask's table is too large, or if the
    kernels cannot be compiled or launched on this device, after a warning.
    """
    device = planes[0].request.q.device
    try:
        with select_device(device):
            return traverse_planes(planes, rows, columns)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler that is missing or too old raises: the plain passes do not need it
        broken_devices.add(device)
        reason = f"{type(error).__name__}: {error}".strip().split("\n")[0]
        warnings.warn(f"the kernels for maps on {device} cannot be used, and slower ones are: {reason}", stacklevel=2)
        return None


def select_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which Triton launches its kernels on this GPU; nothing to enter for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def traverse_planes(planes: Sequence[Plane], rows: Tensor, columns: Tensor) -> Traversals | None:
    """Compute what `gather_statistics` returns, as many planes at a time as the table of their mask allows."""
    request, (q, k) = planes[0].request, planes[0].shape
    offset = request.list_offsets()
    ranges = find_key_ranges(request.mask, q, k, offset)
    has_shared_table = request.mask.batch == request.mask.heads == 1 and isinstance(offset, int)
    group = len(planes) if ranges is not None or has_shared_table else max(1, TABLE_BYTES // (q * k))
    if ranges is None and q * k > TABLE_BYTES:
        return None
    answers: Traversals = []
    for begin in range(0, len(planes), group):
        pairs = torch.tensor([(plane.b, plane.h) for plane in planes[begin : begin + group]], device=request.q.device)
        table = None if ranges is not None else make_table(request, pairs[:1] if has_shared_table else pairs)
        found = traverse_pairs(KernelInputs(request, pairs, move_ranges(ranges, request), table), rows, columns)
        if found is None:
            return None
        answers += found
    return answers


def move_ranges(ranges: tuple[Tensor, Tensor] | None, request: Request) -> tuple[Tensor, Tensor]:
    """Return the ranges of keys on the device of a request; all keys for every query if there are none."""
    device, (q, k) = request.q.device, (request.q.shape[2], request.k.shape[2])
    if ranges is None:
        first, stop = (torch.full((1, q), n, dtype=torch.int32, device=device) for n in (0, k))
        return first, stop
    return ranges[0].to(device), ranges[1].to(device)


def make_table(request: Request, pairs: Tensor) -> Tensor:
    """Make the table of which keys each query of some pairs (n, 2) may see, (n, q, k), a block of rows at a time."""
    device, (q, k) = request.q.device, (request.q.shape[2], request.k.shape[2])
    b, h = (x.view(-1, 1, 1) for x in pairs.T)
    keys = torch.arange(k, device=device)
    table = torch.empty(len(pairs), q, k, dtype=torch.bool, device=device)
    for rows in torch.arange(q, device=device).split(max(1, TABLE_BLOCK // (len(pairs) * k))):
        table[:, rows] = request.mask.can_see(b, h, rows.unsqueeze(-1), keys, request.offset)
    return table


def traverse_pairs(inputs: "KernelInputs", rows: Tensor, columns: Tensor) -> Traversals | None:
    """Run the kernels on some pairs; None if a denominator is not finite."""
    found = summarize_rows(inputs, int(rows[0]), int(rows[-1]))
    shifts, totals = found[:2].clone()  # of their own, so that a map that keeps them does not keep the statistics
    if not (shifts.isfinite() & totals.isfinite()).all():
        return None
    edges = rows.to(found.device), columns.to(found.device)
    answers: Traversals = []
    for n, (received, total, largest) in enumerate(sum_columns(inputs, found, rows, columns)):
        statistics = dict(zip(NAMES[2:], found[2:, n], strict=True))
        result = TraversalResult(statistics, received, Denominators(shifts[n], totals[n]))
        answers.append((result, BinnedWeights.from_sums(*edges, total, largest)))
    return answers


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """What both kernels take: the tensors, their strides, and the settings of the scores."""

    request: Request
    pairs: Tensor  # (n, 2), int64: batch row and head of each matrix
    ranges: tuple[Tensor, Tensor]  # first and stop key of each query, (b or 1, q), int32
    table: Tensor | None  # (n or 1, q, k), bool

    @property
    def tile(self) -> Tile:
        """The tile whose queries and keys fit into the memory that the threads of a GPU share."""
        size = self.padded_width * self.request.q.element_size()
        return next(tile for most, tile in TILES if size <= most)

    @property
    def padded_width(self) -> int:
        """The numbers of a query, padded to a power of 2."""
        return max(NARROWEST, 1 << (self.request.q.shape[3] - 1).bit_length())

    @property
    def tensors(self) -> list[Tensor]:
        """q, k, bias and table; any tensor in place of what is missing."""
        request = self.request
        bias, table = (request.q if x is None else x for x in (request.bias, self.table))
        return [request.q, request.k, bias, table]

    @property
    def numbers(self) -> list[int]:
        """The strides of the tensors and of the ranges, and how many heads share their keys."""
        request, low, table, bias = self.request, self.ranges[0], self.table, self.request.bias
        strides = [*request.q.stride(), *request.k.stride()]
        strides += [0] * 4 if bias is None else bias.expand(*request.q.shape[:3], request.k.shape[2]).stride()
        strides.append(0 if table is None or len(table) == 1 else table.stride(0))
        return [*strides, low.stride(0) if len(low) > 1 else 0, request.q.shape[1] // request.k.shape[1]]

    @property
    def settings(self) -> list[int | float]:
        """The number of keys, the width of each, the scale, the softcap, and the number of matrices."""
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
            "padded_width": self.padded_width,
            "precision": PRECISION,
            "tile_keys": self.tile.keys,
            "num_warps": WARPS,
            "num_stages": self.tile.stages,
        }


def summarize_rows(inputs: KernelInputs, first: int, last: int) -> Tensor:
    """Compute the denominators and statistics of the queries first to last of each matrix, (9, n, last - first)."""
    from regard.map.compiled import triton_kernels

    request, units, count = inputs.request, len(inputs.pairs), last - first
    found = torch.empty(len(NAMES), units, count, dtype=torch.float32, device=request.q.device)
    sinks = request.q if request.sinks is None else request.sinks.float()[inputs.pairs[:, 1]].contiguous()
    blocks, offsets = -(-count // inputs.tile.rows), select_offsets(request, inputs.pairs[:, 0]).contiguous()
    if count:
        triton_kernels.summarize_rows[(blocks * units,)](
            *inputs.tensors, *inputs.ranges, sinks, inputs.pairs, offsets, found,
            *inputs.numbers, first, count, *inputs.settings, blocks,
            has_sinks=request.sinks is not None, tile_rows=inputs.tile.rows, **inputs.constants,
        )  # fmt: skip
    return found


def sum_columns(inputs: KernelInputs, found: Tensor, rows: Tensor, columns: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield of each matrix the sums of its columns, (k,), and the sums and the largest of the weights in the picture's bins."""
    device, k = found.device, inputs.request.k.shape[2]
    starts, stops, owners = list_row_blocks(rows, inputs.tile.rows)
    group = max(1, min(len(inputs.pairs), SUM_NUMBERS // k))
    for begin in range(0, len(inputs.pairs), group):
        table = inputs.table if inputs.table is None or len(inputs.table) == 1 else inputs.table[begin : begin + group]
        some = replace(inputs, pairs=inputs.pairs[begin : begin + group], table=table)
        units, step = len(some.pairs), max(1, SUM_NUMBERS // (k * group))
        received = torch.zeros(units, k, dtype=torch.float64, device=device)
        total = torch.zeros(len(rows) - 1, units, len(columns) - 1, dtype=torch.float64, device=device)
        largest = torch.zeros(total.shape, dtype=torch.float32, device=device)
        for i in range(0, len(starts), step):
            bounds = starts[i : i + step], stops[i : i + step]
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

    device, blocks, units, k = found.device, len(starts), len(inputs.pairs), inputs.request.k.shape[2]
    sums, largest = torch.zeros(2, blocks, units, k, dtype=torch.float32, device=device)
    shift, total = found[:2].contiguous()
    rows = max(NARROWEST, 1 << (int((stops - starts).max()) - 1).bit_length())
    triton_kernels.sum_columns[(blocks * units,)](
        *inputs.tensors, *inputs.ranges, inputs.pairs, shift, total, starts.to(device), stops.to(device), sums, largest,
        *inputs.numbers, first, found.shape[2], *inputs.settings, blocks, tile_rows=rows, **inputs.constants,
    )  # fmt: skip
    return sums, largest


def pool_columns(sums: Tensor, largest: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the sum, in float64, and the largest of the numbers (..., k) in each bin of keys, given the bins' edges."""
    from regard.map.compiled import triton_kernels

    (*axes, k), bins = sums.shape, len(edges) - 1
    total = torch.empty(*axes, bins, dtype=torch.float64, device=sums.device)
    most = torch.empty(*axes, bins, dtype=torch.float32, device=sums.device)
    widest = int(edges.diff().max())
    width = min(MOST_OF_BIN, 1 << max(widest - 1, 0).bit_length())
    together = max(1, NUMBERS_OF_BINS // width)
    triton_kernels.pool_columns[sums.shape[:-1].numel(), -(-bins // together)](
        sums, largest, edges.to(sums.device), total, most, k, bins, widest, tile_bins=together, tile_keys=width, num_warps=WARPS
    )
    return total, most


def list_row_blocks(edges: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """List blocks of at most so many rows, none across an edge of the bins: their starts, stops, and bins, (n,) each."""
    sizes = edges.diff()
    pieces = -(-sizes // most)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), pieces)
    place = torch.arange(len(owner)) - (pieces.cumsum(0) - pieces)[owner]
    starts, stops = (edges[owner] + n * sizes[owner] // pieces[owner] for n in (place, place + 1))
    return starts, stops, owner
