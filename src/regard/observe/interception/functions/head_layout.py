"""Where batch, heads and tokens are in the tensors of a call of F.scaled_dot_product_attention, whose layout varies."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.folded_heads import FoldedHeads, find_folded_heads
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.plain_tensors import unwrap_tensor
from regard.observe.interception.thread_state import STATE


class HeadLayout(NamedTuple):
    """How the tensors of a call become (..., h, t, d), and its output becomes (b, h, t, e) and is laid out again.

    folded: the heads of tensors (n, t, d), as what made the values shows them; None if unknown, or if the tensors have an axis
    of heads.
    axis: that of the heads, counted from the last one.
    axes: how many the query has once `folded` is split.
    rows: the length n of the first axis of a query (n, t, d) that is not split, and `batch_and_heads`, into which its inputs
    show that n splits.
    """

    folded: FoldedHeads | None
    axis: int
    axes: int
    rows: int
    batch_and_heads: tuple[int, int]

    def arrange(self, x: Tensor) -> Tensor:
        """Return a query, keys, values or a mask as (..., h, t, d)."""
        if self.folded is not None:
            x = unfold_heads(x, self.folded)
        if self.axis != -3:
            return x[(None,) * (self.axes - x.dim())].movedim(self.axis, -3)
        if x.dim() == 2:
            return x[None]
        return x.unflatten(0, self.batch_and_heads if len(x) == self.rows else (1, -1)) if self.axes == x.dim() == 3 else x

    def make_adapter(self, run: Callable[[], Tensor], shape: tuple[int, ...]) -> CallAdapter:
        """Return the adapter of a call whose output, arranged, has a shape (..., h, t, e)."""

        def read_output(out: Tensor) -> Tensor:
            out = unwrap_tensor(out)
            if self.folded is not None and self.folded.is_before:
                return unfold_heads(out, self.folded)
            out = out.movedim(self.axis, -3) if self.axis != -3 else out
            return out.reshape(math.prod(shape[:-3]), *shape[-3:])

        def write_output(new: Tensor, out: Tensor) -> Tensor:
            if self.folded is not None and self.folded.is_before:
                return new.transpose(0, 1).reshape(out.shape)
            return new.reshape(shape).movedim(-3, self.axis) if self.axis != -3 else new.reshape(out.shape)

        return CallAdapter(run, read_output, write_output)


def find_head_layout(query: Tensor, key: Tensor, value: Tensor, *, is_distributed: bool) -> HeadLayout:
    """Return the layout of the tensors of a call, as the modules that run and what made the values show it.

    Local parts of distributed tensors have their heads at axis -3.
    """
    folded = find_folded_heads(STATE.frames, value) if query.dim() == value.dim() == 3 and not is_distributed else None
    if folded is not None:
        return HeadLayout(folded, -3, 4, len(query), (1, -1))
    pair = infer_batch_and_heads(query) if query.dim() == 3 else (1, -1)
    axis = -3 if is_distributed else -4 if are_heads_first(query, value) else find_heads_axis(query, key, value)
    return HeadLayout(None, axis, query.dim(), len(query), pair)


def are_heads_first(query: Tensor, value: Tensor) -> bool:
    """Return whether the tensors are (h, b, t, d), as what made the values shows; not looked up where modules state (b, h)."""
    if not query.dim() == value.dim() == 4:
        return False
    if find_head_counts(least=1)[:1] == [query.shape[1]] and query.shape[0] != query.shape[1]:
        return False
    folded = find_folded_heads(STATE.frames, value, (0, 1))
    return folded is not None and folded.is_before


def unfold_heads(x: Tensor, folded: FoldedHeads) -> Tensor:
    """Return a tensor (n, t, e) as (b, h, t, e), one that all rows share as (1, 1, t, e); any other as it is."""
    if x.dim() != 3 or len(x) == 1:
        return x[None] if x.dim() == 3 else x
    found: Tensor = x.unflatten(0, (folded.heads, -1) if folded.is_before else (-1, folded.heads))
    return found.transpose(0, 1) if folded.is_before else found


def find_heads_axis(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the axis of heads of tensors (b, ..., t, d) with several axes before t: -3, or the one whose size modules state.

    Windows stand behind the heads in Hiera and NesT of timm, for one.
    """
    axes = range(1 - query.dim(), -2)
    if not len(axes) > 1 or not query.dim() == key.dim() == value.dim():
        return -3
    for count in dict.fromkeys(find_head_counts(least=1)):
        fits = [axis for axis in axes if query.shape[axis] == count]
        if fits:
            return fits[0] if len(fits) == 1 else -3
    return -3


def infer_batch_and_heads(query: Tensor) -> tuple[int, int]:
    """Return the batch size and number of heads that the first axis of a query (n, t, d) splits into; (1, -1) if unknown.

    They are inferred from an input (b, t, c), (t, b, c), or (b, rows, columns, c) with rows * columns tokens, of the running
    modules.
    """
    n, t = query.shape[:2]
    inputs = (one.input_tensors for one in reversed(STATE.frames))
    tensors = next((tensors for tensors in inputs if all(unwrap_tensor(x) is not query for x in tensors)), [])
    for x in sorted(tensors, key=Tensor.dim):  # (b, t, c) before a mask (1, 1, q, k)
        pairs = (x.shape[:2], x.shape[1::-1]) if x.dim() == 3 else ((x.shape[0], x.shape[1:-1].numel()),) * (x.dim() == 4)
        for b, tokens in pairs:
            if tokens == t and b and n % b == 0:
                return b, n // b
    return 1, -1
