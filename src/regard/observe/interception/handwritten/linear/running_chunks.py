"""Causal linear attention in chunks: running sums of products of keys with values, to which the last sums before are added.

So Performer computes it without a kernel. Each chunk has its queries, keys and values; all of them are one call.
https://arxiv.org/abs/2009.14794
"""

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.windows import TOKEN_CUTS
from regard.observe.interception.handwritten.linear.linear_call import LinearCall
from regard.observe.interception.handwritten.products.score_form import StepKind
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.products.traces import Trace

UNCHANGED = "it is linear attention in chunks, whose sums are added to those of the next chunk"
SERIAL = count()


class ChunkPlace(NamedTuple):
    """The place of a chunk of tokens: the loop, by number, and how many chunks of it come before."""

    loop: int
    number: int

    @classmethod
    def start(cls) -> "ChunkPlace":
        """Return the place of the first chunk of another loop."""
        return cls(next(SERIAL), 0)

    def follow(self) -> "ChunkPlace":
        """Return the place of the next chunk of the same loop."""
        return self._replace(number=self.number + 1)


class RunningChunks:
    """The running sums of the modules that run, and what was cut out of them to be added to those of the next chunk."""

    def __init__(self, table: AxisTable) -> None:
        self.table = table
        self.sums = WeakTensorKeyDictionary()
        self.carried = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget all sums."""
        self.sums.clear()
        self.carried.clear()

    def follow_sum(self, find: Callable[[Tensor], Trace | None], args: Any, y: Tensor) -> Trace | None:
        """Return the trace of y if it is a running sum plus the number 0, or plus the last sums of the chunk before."""
        for x, other in (args[:2], args[1::-1]) if len(args) == 2 else ():
            trace = find(x) if isinstance(x, Tensor) else None
            form = None if trace is None else trace.form
            if form is None or not form.steps or form.steps[-1].kind is not StepKind.CUMSUM or y.shape != x.shape:
                continue
            before = self.carried.get(other) if isinstance(other, Tensor) else None
            is_start = find(other) is None and not other.any() if isinstance(other, Tensor) else other == 0
            if before is not None or is_start:
                self.sums[y] = ChunkPlace.start() if before is None else before.follow()
                return trace
        return None

    def follow_cut(self, trace: Trace | None, name: str, args: Any, y: Tensor) -> bool:
        """Return whether y is one entry of a followed running sum along its tokens, and follow it."""
        form = None if trace is None else trace.form
        if strip_affixes(name) not in TOKEN_CUTS or trace is None or form is None or not form.steps or trace.dims is None:
            return False
        tokens = {axis for axes in form.steps[-1].dims for axis in self.table.expand_axes(axes)}
        size = next(
            (n for n, axes in zip(args[0].shape, self.table.expand_dims(trace.dims), strict=True) if {*axes} == tokens), 0
        )
        if y.numel() * size != args[0].numel():
            return False
        self.carried[y] = self.sums[args[0]]
        return True


def join_running_chunks(calls: list[tuple[ChunkPlace, LinearCall | None]]) -> LinearCall | None:
    """Return the call of all chunks of a loop; None if one is missing or another one than the others."""
    ordered = sorted(calls, key=lambda one: one[0].number)
    parts = [call for _, call in ordered if call is not None and (call.is_causal or call.k.shape[2] == 1)]
    numbers = sorted(chunk.number for chunk, _ in calls)
    if len(parts) < len(calls) or numbers != [*range(len(calls))]:
        return None
    first = parts[0]
    shapes = {(one.q.shape[:2], one.q.shape[3], one.v.shape[3]) for one in parts}
    if len(shapes) > 1 or any(not torch.equal(one.columns, first.columns) for one in parts):
        return None
    q, k, v, outputs, row_scale = (
        torch.cat([getattr(one, name) for one in parts], 2) for name in ("q", "k", "v", "outputs", "row_scale")
    )
    return LinearCall(first.kernel, q, k, v, True, outputs, first.columns, row_scale, max(one.eps for one in parts))
