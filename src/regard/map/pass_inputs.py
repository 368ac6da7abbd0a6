"""The input of the compiled passes: which rows see which keys, in which blocks, and the inputs of the scores."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.map.attribution_passes import Products
from regard.map.plane import BLOCK_NUMBERS, GAP, Plane
from regard.mechanism import spans
from regard.mechanism.mask_algebra import Mask, QueryBlock
from regard.mechanism.spans import Span, Spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.map.compiled.blocks import BlockPlan, PlaneInputs, ProductInputs, ScoreInputs

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float32]
    Sums = NDArray[np.float64]
    Integers = NDArray[np.int64]

RUN = 128  # rows for which the mask is evaluated at once
FEW, MANY, LONG = 16, 64, 2**15  # rows of a block; MANY for more than LONG keys, which leave the caches


Part = tuple[Span, Span]  # the rows and the keys of a part of a matrix


def make_plans(plane: Plane, part: Part | None = None) -> Iterable["BlockPlan"]:
    """Return the plans of the rows of a plane, or of a part: as many rows in each as a block's numbers allow."""
    (q, k), request = plane.shape, plane.request
    part = part or ((0, q), (0, k))
    if request.bias is None and request.mask.is_relative:
        return (make_relative_plan(request.mask, plane.offset, part, k),)
    return make_general_plans(plane, part)


def make_general_plans(plane: Plane, part: Part) -> Iterator["BlockPlan"]:
    """Yield the plans for any mask and bias."""
    (first, last), k = part[0], plane.shape[1]
    wide = plane.request.bias is not None
    draft = PlanBuilder(plane.request.mask, part[1], k)
    for start in range(first, last, RUN):
        stop = min(start + RUN, last)
        for i, j in draft.add(plane.make_query_block(start, stop)):
            draft.add_visibility(i, j, (i, j, start), plane.can_see(*make_indices(start, stop, i, j)))
        if draft.numbers + wide * (stop - draft.runs[0][0]) * k > BLOCK_NUMBERS:
            yield draft.build()
            draft = PlanBuilder(plane.request.mask, part[1], k)
    if draft.runs:
        yield draft.build()


@functools.lru_cache(maxsize=8)
def make_relative_plan(mask: Mask, offset: int, part: Part, k: int) -> "BlockPlan":
    """Return the plan for a mask that depends only on the distance of key and query, so that many runs share one table."""
    draft = PlanBuilder(mask, part[1], k)
    zero = torch.zeros(1, dtype=torch.int64)
    for start in range(*part[0], RUN):
        stop = min(start + RUN, part[0][1])
        for i, j in draft.add(QueryBlock(start, stop, offset, offset)):
            key = (i - start, j - start, stop - start)
            seen = None if key in draft.tables else mask.can_see(zero, zero, *make_indices(start, stop, i, j), offset)
            draft.add_visibility(i, j, key, seen)
    return draft.build()


class PlanBuilder:
    """A plan under construction."""

    def __init__(self, mask: Mask, keys: Span, k: int) -> None:
        self.mask, self.keys, self.k = mask, keys, k
        self.runs: list[tuple[int, ...]] = []
        self.ranges: list[Span] = []
        self.partial: list[tuple[int, int, int]] = []
        self.tables: dict[tuple[int, ...], tuple[int, Bools]] = {}
        self.numbers = 0  # entries in the tables

    def add(self, rows: QueryBlock) -> Spans:
        """Add a block of rows and return the ranges of keys that only some of them see: call `add_visibility` for each."""
        from regard.compiled.register_tiles import COLUMNS

        may = spans.intersection(spans.merge_spans(self.mask.find_possible_keys(rows, self.k), GAP), (self.keys,))
        aligned_spans = spans.align_spans(may, COLUMNS, self.k)
        unsure = spans.intersection(aligned_spans, spans.complement(self.mask.find_certain_keys(rows, self.k), self.k))
        lines = len(self.ranges), len(self.ranges) + len(aligned_spans), len(self.partial), len(self.partial) + len(unsure)
        self.runs.append((rows.start, rows.stop, *lines))
        self.ranges += aligned_spans
        return unsure

    def add_visibility(self, first: int, last: int, key: tuple[int, ...], seen: Tensor | None) -> None:
        """Record which keys from first to last the latest rows see, (n, m) or broadcastable; None if `key` has a table."""
        if key not in self.tables:
            assert seen is not None
            rows = self.runs[-1][1] - self.runs[-1][0]
            self.tables[key] = self.numbers, seen.expand(rows, last - first).reshape(-1).numpy()
            self.numbers += rows * (last - first)
        self.partial.append((first, last, self.tables[key][0]))

    def build(self) -> "BlockPlan":
        """Return the plan."""
        from regard.map.compiled.blocks import CHUNK, BlockPlan

        lines = ((self.runs, 6), (self.ranges, 2), (self.partial, 3))
        runs, ranges, partial = (np.array(x, np.int64).reshape(-1, n) for x, n in lines)
        stretches = np.append(0, np.cumsum(-(-(ranges[:, 1] - ranges[:, 0]) // CHUNK)))
        most = int((stretches[runs[:, 3]] - stretches[runs[:, 2]]).max())
        table = np.concatenate([np.zeros(0, np.bool_), *(seen for _, seen in self.tables.values())])
        return BlockPlan(runs, ranges, partial, table, most, MANY if most * CHUNK > LONG else FEW)


def make_indices(start: int, stop: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return the indices of rows (n, 1) and of keys (m,)."""
    return torch.arange(start, stop).unsqueeze(-1), torch.arange(first, last)


def make_blocks(plan: "BlockPlan", edges: "Integers") -> "Integers":
    """Return the blocks of a plan's rows, none across an edge: a line each with its unit, its run, its start and its stop.

    A unit is the work of one thread: whole blocks, and as many of the parts between edges as make a block.
    """
    starts, last = plan.runs[:, 0], plan.runs[-1, 1]
    wanted = np.arange(starts[0], last, plan.rows)
    units = np.unique(edges[np.searchsorted(edges, wanted, side="right") - 1])
    cuts = np.unique(np.concatenate([starts, units[(units > starts[0]) & (units < last)], [last]]))
    pieces = -(-np.diff(cuts) // plan.rows)
    place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    rows = np.append(np.repeat(cuts[:-1], pieces) + place * plan.rows, last)
    unit, run = (np.searchsorted(x, rows[:-1], side="right") - 1 for x in (units, starts))
    return np.stack([unit, run, rows[:-1], rows[1:]], 1)


def group_by_plan(planes: Sequence[Plane]) -> list[list[int]]:
    """Group planes of one request, by index, that have the same plans and bias."""
    mask, bias, offset = planes[0].request.mask, planes[0].request.bias, planes[0].request.offset
    groups: dict[tuple[int, int], list[int]] = {}
    by_row = mask.batch > 1 or not isinstance(offset, int) or (bias is not None and len(bias) > 1)
    by_head = mask.heads > 1 or (bias is not None and bias.shape[1] > 1)
    for n, plane in enumerate(planes):
        groups.setdefault((plane.b if by_row else 0, plane.h if by_head else 0), []).append(n)
    return list(groups.values())


def make_score_inputs(plane: Plane, edges: "Integers") -> "ScoreInputs":
    """Return the inputs of the scores of a plane, without the bias, for blocks that do not cross the edges."""
    flat, stride = flatten_rows(plane.q, edges)
    panels = pack_panels(plane.k.T.numpy(), plane.request.scale)
    return make_unpacked_inputs(plane)._replace(q=flat, stride=stride, panels=panels)


def make_unpacked_inputs(plane: Plane) -> "ScoreInputs":
    """Return the inputs of the scores of a plane, without the queries, the keys and the bias."""
    from regard.map.compiled import blocks

    softcap, sink = np.float32(plane.request.softcap or 0), np.float32(-np.inf if plane.sink is None else float(plane.sink))
    panels = np.zeros((0, plane.q.shape[1], get_panel_width()), np.float32)
    return blocks.ScoreInputs(np.zeros(0, np.float32), 0, panels, softcap, NO_BIAS, sink, plane.offset)


def locate_planes(planes: Sequence[Plane], numbers: Sequence[int]) -> "PlaneInputs":
    """Return where the queries and keys of some planes, by index, are in memory: they have to stay alive, as the planes do."""
    from regard.map.compiled import blocks

    lines = [
        (n, q.data_ptr(), k.data_ptr(), q.stride(0), k.stride(0), q.stride(1), k.stride(1), planes[n].offset)
        for n, q, k in ((n, planes[n].q, planes[n].k) for n in numbers)
    ]
    sinks = np.array([-np.inf if sink is None else float(sink) for sink in (planes[n].sink for n in numbers)], np.float32)
    scale = np.float32(planes[0].request.scale)
    return blocks.PlaneInputs(np.array(lines, np.int64), sinks, *planes[0].shape, scale)


def make_product_inputs(products: Products, edges: "Integers") -> "ProductInputs":
    """Return the inputs of the products of an attribution map, for blocks that do not cross the edges."""
    from regard.map.compiled import blocks

    means = np.zeros(0, np.float32) if products.means is None else products.means.contiguous().numpy()
    flat, stride = flatten_rows(products.left, edges)
    return blocks.ProductInputs(flat, stride, pack_panels(products.right.T.numpy()), products.factor != "one", means)


def flatten_rows(x: Tensor, edges: "Integers") -> tuple["Floats", int]:
    """Return rows (n, d) as a flat array, readable to the end of the last tile of ROWS rows, and the step between rows.

    A tile starts ROWS rows after another one, or at an edge.
    """
    from regard.compiled.register_tiles import ROWS

    past = ROWS - 1 if (edges[edges < len(x)] % ROWS).any() else -len(x) % ROWS
    if past or x.stride(1) != 1:
        x = torch.nn.functional.pad(x, (0, 0, 0, past)).contiguous()
    return x.as_strided(((len(x) - 1) * x.stride(0) + x.shape[1],), (1,)).numpy(), x.stride(0)


def pack_panels(x: "Floats", scale: float = 1.0) -> "Floats":
    """Pack columns (d, n), scaled, into panels (n / COLUMNS, d, COLUMNS), the last of which is padded with zeros."""
    from regard.compiled import register_tiles
    from regard.map.compiled import blocks

    found = np.zeros((-(-x.shape[1] // register_tiles.COLUMNS), x.shape[0], register_tiles.COLUMNS), np.float32)
    blocks.fill_panels(x, scale, found)
    return found


def get_panel_width() -> int:
    """Return the number of columns of a panel."""
    from regard.compiled.register_tiles import COLUMNS

    return COLUMNS


NO_BIAS = np.zeros((0, 0), np.float32)


def get_plan_bias(plane: Plane, plan: "BlockPlan") -> "Floats":
    """Return the bias of a plan's rows, (rows or 1, k or 1), or NO_BIAS."""
    own = plane.request.bias
    if own is None:
        return NO_BIAS
    own = own[plane.b if len(own) > 1 else 0, plane.h if own.shape[1] > 1 else 0]
    part = own[plan.runs[0, 0] : plan.runs[-1, 1]] if len(own) > 1 else own
    found: Floats = part.float().to_dense().contiguous().numpy()
    return found
