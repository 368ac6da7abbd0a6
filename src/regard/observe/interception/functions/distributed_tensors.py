"""Attention on DTensors, which are split among ranks: the part of queries, keys, values and masks that this rank computes.

Each rank computes whole rows of some heads or batch rows, so that its part is attention of its own. No rank sends anything.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.observe.interception.attention_call import AttentionCall, CallAdapter, RankPart
from regard.observe.interception.plain_tensors import UnreadableError, is_distributed

HEADS = -3  # the axis of heads of (..., h, t, d); those before it are of the batch
SPLIT = (
    "the placements of its {} are {}, so that no rank has whole rows of weights and values of a head: split queries, keys and "
    "values along the axis of heads or of the batch alone, or gather them with full_tensor()"
)
UNLIKE = "its {} and its {} are not split among the ranks alike: their placements are {} and {}"
UNEVEN = "this rank has no whole heads or no whole batch rows"
BATCH_PART = "its batch is split among ranks"
Axes = tuple[int, ...]  # as in tensor_axes.py, which imports this module
Dims = tuple[Axes, ...]


def describe_placements(x: Any) -> str:
    """Return the placements of a DTensor in words; any other tensor has none."""
    return repr(tuple(x.placements)) if is_distributed(x) else "none"


def take_local(x: Any) -> Any:
    """Return this rank's part of a DTensor; anything else as it is."""
    return x.to_local() if is_distributed(x) else x


def describe_batch_part(mesh: Any, split_dims: list[int]) -> str:
    """Return which part of the batch this rank has, if the batch is split along some dimensions of a mesh; else nothing."""
    parts = [f"part {mesh.get_local_rank(n) + 1} of {mesh.size(n)}" for n in split_dims if mesh.size(n) > 1]
    return f"{BATCH_PART}: this rank has {', '.join(parts)}" if parts else ""


def find_split_axes(x: Any, name: str) -> list[int | None]:
    """Return the axis of a DTensor (..., h, t, d), from the end, that each dimension of its mesh splits, or None.

    Raises UnreadableError if an axis of the matrix of a head is split.
    """
    axes: list[int | None] = []
    for placement in x.placements if is_distributed(x) else ():
        is_shard = type(placement).__name__ == "Shard"  # one run of entries on each rank
        axes.append(placement.dim % x.dim() - x.dim() if is_shard else None)
        if not (placement.is_replicate() or (is_shard and axes[-1] <= HEADS)):  # type: ignore[operator]
            raise UnreadableError(SPLIT.format(name, describe_placements(x)))
    return axes


def take_local_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Any = None
) -> tuple[Tensor, Tensor, Tensor, Any, RankPart | None, str]:
    """Return queries, keys, values and a mask of the heads and batch rows that this rank computes, which, and a note on them.

    Which they are is None for queries without an axis of heads of its own, (..., t, d) or (n, t, d).

    Raises UnreadableError if no head is whole on this rank, or if keys or a mask are not of the same heads.
    """
    axes = find_split_axes(query, "queries")
    for name, x in (("keys", key), ("values", value), ("mask", mask)):
        if not isinstance(x, Tensor):
            continue
        own = find_split_axes(x, name) or [None] * len(axes)
        for mine, theirs in zip(axes or [None] * len(own), own, strict=True):
            is_shared = theirs is None and mine is not None and (x.dim() < -mine or x.shape[mine] == 1)
            if mine != theirs and not is_shared:
                raise UnreadableError(UNLIKE.format("queries", name, describe_placements(query), describe_placements(x)))
        if name != "mask" and x.dim() > 2 and x.shape[HEADS] > 1:
            heads, shared = take_local(query).shape[HEADS], take_local(x).shape[HEADS]
            if heads * x.shape[HEADS] != shared * query.shape[HEADS]:  # a rank would share keys otherwise than all ranks do
                raise UnreadableError(UNEVEN)
    dims = [n for n, axis in enumerate(axes) if axis is not None and axis < HEADS]
    note = describe_batch_part(query.device_mesh, dims) if dims else ""  # type: ignore[attr-defined]
    part = None
    if is_distributed(query) and query.dim() > -HEADS:
        span = Span(0, query.shape[HEADS], query.shape[HEADS])
        for n, axis in enumerate(axes):
            span = span.narrow(query.device_mesh.size(n), query.device_mesh.get_local_rank(n)) if axis == HEADS else span  # type: ignore[attr-defined]
        part = RankPart(tuple(range(span.start, span.start + span.length)), span.total, not note)
    return take_local(query), take_local(key), take_local(value), take_local(mask), part, note


def make_part_adapter(
    call: AttentionCall,
    query: Any,
    run: Callable[[], Any],
    read: Callable[[Any], Any] = lambda out: out,
    write: Callable[[Tensor, Any], Any] = lambda new, out: distribute_like(new, out),
) -> CallAdapter:
    """Return the adapter of this rank's part of a call, whose context is split as its queries are.

    read takes a result to its context, a DTensor (..., h, q, e); write takes this rank's context (b, h, q, e) and the result to
    another result. Raises ConfigError when the context turns out to be split otherwise.
    """
    if call.rank_part is None or len(call.rank_part.heads) != call.q.shape[1]:
        return CallAdapter(run)

    def read_context(out: Any) -> Tensor:
        context = read(out)
        if describe_placements(context) != describe_placements(query):
            raise ConfigError(
                UNLIKE.format("queries", "context", describe_placements(query), describe_placements(context))
                + ", so that it cannot be changed."
            )
        local: Tensor = take_local(context)
        return local.reshape(-1, *local.shape[HEADS:])

    return CallAdapter(run, read_context, write, is_reversible=False)


def distribute_like(part: Tensor, like: Any) -> Any:
    """Return this rank's part of a tensor, in any shape, as a DTensor of the shape and placements of another one."""
    local = part.reshape(like.to_local().shape)
    strides = [math.prod(like.shape[n + 1 :]) for n in range(like.dim())]
    place = {"shape": like.shape, "stride": tuple(strides), "run_check": False}
    return type(like).from_local(local.contiguous(), like.device_mesh, like.placements, **place)


class Span(NamedTuple):
    """The entries of an axis that this rank has: the first, their number, and that of all ranks together."""

    start: int
    length: int
    total: int

    def narrow(self, parts: int, number: int) -> "Span":
        """Return the span of one of several parts, of equal length but for the last ones, as torch.chunk makes them."""
        each = -(-self.length // parts)
        first = min(each * number, self.length)
        return Span(self.start + first, min(each, self.length - first), self.total)


@dataclass(frozen=True, eq=False)
class RankSplit:
    """How the axes of a handwritten call are split among ranks: for each dimension of their mesh, the axis or None."""

    mesh: Any
    axes: tuple[int | None, ...]
    spans: Mapping[int, Span]  # of each axis that is split
    placements: str
    note: str

    def find_part(self, batch: Axes, heads: Axes, sizes: Mapping[int, int]) -> RankPart:
        """Return which heads this rank computes, and whether all batch rows; `sizes` are those of all ranks together."""
        shape = [sizes[axis] for axis in heads]
        numbers = torch.arange(math.prod(shape)).reshape(shape)
        for n, axis in enumerate(heads):
            if axis in self.spans:
                numbers = numbers.narrow(n, self.spans[axis].start, self.spans[axis].length)
        is_whole = all(span.length == span.total for axis, span in self.spans.items() if axis in batch)
        return RankPart(tuple(numbers.flatten().tolist()), math.prod(shape), is_whole)

    def take_part(self, x: Tensor, dims: Dims, sizes: Mapping[int, int]) -> Tensor:
        """Return this rank's part of a tensor, with one dimension for each of its axes; `sizes` are those of a part.

        A tensor that every rank has whole is cut. Raises UnreadableError if it is split along other axes than the call.
        """
        totals = {**sizes, **{axis: span.total for axis, span in self.spans.items()}}
        own = find_placed_axes(x, dims, totals, "tensors") or (None,) * len(self.axes)
        have = [axis for axes in dims for axis in axes]
        cut = {axis for mine, axis in zip(own, self.axes, strict=True) if mine is None and axis in have}
        is_same = all(mine is None or mine == axis for mine, axis in zip(own, self.axes, strict=True))
        if not is_same or cut & {*own} or (is_distributed(x) and x.device_mesh != self.mesh):  # type: ignore[attr-defined]
            raise UnreadableError(UNLIKE.format("context", "other tensors", self.placements, describe_placements(x)))
        x, shape = take_local(x), [totals[axis] if axis in cut else sizes[axis] for axis in have]
        if x.numel() != math.prod(shape):
            raise UnreadableError(UNEVEN)
        x = x.reshape(shape)
        for n, axis in enumerate(have):
            x = x.narrow(n, self.spans[axis].start, self.spans[axis].length) if axis in cut else x
        return x


def find_placed_axes(x: Any, dims: Dims, sizes: Mapping[int, int], name: str) -> tuple[int | None, ...]:
    """Return the axis of a DTensor that each dimension of its mesh splits, None if it splits none; () for a plain tensor.

    `sizes` are those of all ranks together. Raises UnreadableError if a sum is split, or entries of no single axis.
    """
    axes: list[int | None] = []
    left = dict(sizes)
    for n, placement in enumerate(x.placements if is_distributed(x) else ()):
        axis = None
        if not placement.is_replicate():
            axis = find_placed_axis(placement, dims, left)
            if axis is None:
                raise UnreadableError(SPLIT.format(name, describe_placements(x)))
            left[axis] = Span(0, left[axis], left[axis]).narrow(x.device_mesh.size(n), x.device_mesh.get_local_rank(n)).length
        axes.append(axis)
    return tuple(axes)


def find_placed_axis(placement: Any, dims: Dims, sizes: Mapping[int, int]) -> int | None:
    """Return the axis that a placement splits among those that a dimension of a tensor holds; None if it is not one of them.

    A strided placement splits an inner axis, each entry of the axes before it by itself.
    """
    name, before = type(placement).__name__, 1
    if name not in ("Shard", "_StridedShard"):
        return None
    repeats = placement.split_factor if name == "_StridedShard" else 1
    axes: Axes = dims[placement.dim]
    for axis in axes:
        if before == repeats:
            return axis
        before *= sizes[axis]
    return None


def find_split(context: Any, dims: Dims, batch: Axes, heads: Axes, sizes: Mapping[int, int]) -> RankSplit | None:
    """Return how the context of a handwritten call is split among ranks, from the axes of its dimensions; None if it is not.

    Raises UnreadableError if axes other than those of batch and heads are split, or if this rank has none of their entries.
    """
    if not is_distributed(context):
        return None
    mesh, axes = context.device_mesh, find_placed_axes(context, dims, sizes, "context")
    spans: dict[int, Span] = {}
    for n, axis in enumerate(axes):
        if axis is None:
            continue
        if axis not in (*batch, *heads):
            raise UnreadableError(SPLIT.format("context", describe_placements(context)))
        before = spans.get(axis, Span(0, sizes[axis], sizes[axis]))
        spans[axis] = before.narrow(mesh.size(n), mesh.get_local_rank(n))
        if not spans[axis].length:
            raise UnreadableError(UNEVEN)
    note = describe_batch_part(mesh, [n for n, axis in enumerate(axes) if axis in batch])
    return RankSplit(mesh, axes, spans, describe_placements(context), note)
