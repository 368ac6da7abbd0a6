"""Loops over blocks of keys: exponentials of the scores of each block, times values, that are added up to one softmax.

Flash attention and other online softmaxes shift each block by the largest scores so far, and rescale what they have added up.
However they do it, their output is that of a softmax over all blocks: where it is, as sampled rows show, these are one call.
"""

import weakref
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.function_roles import BASES, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.ancestors.layouts import is_layout
from regard.observe.interception.handwritten.products.score_form import PERMUTES, PRODUCTS, QUOTIENTS, VIEWS, follow_dims
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.scores.axis_groups import Groups
from regard.observe.interception.handwritten.scores.row_comparison import SAMPLED_ROWS
from regard.observe.interception.handwritten.scores.row_edits import MAXIMA_OF_TWO
from regard.observe.interception.handwritten.scores.score_formula import (
    collect_parts,
    is_query_first,
)
from regard.observe.interception.lookups import SPLITS
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import JOINS, TOKEN, ModuleFrame
from regard.observe.interception.tensor_arguments import find_tensors

BLOCKS = (
    "its exponentials are shifted by a running maximum: it is a sum over blocks of keys in a loop, as of an online softmax, "
    "whose rows are not known until the last block"
)
KEYS = "it is a sum over keys in a loop, one by one, whose rows are not known until the last key"
OTHERWISE = "it adds up blocks of keys in a loop, and its output is not that of a softmax over all of them"
BLOCK_CUTS = SPLITS | {"getitem", "narrow", "split_with_sizes"}
BLOCK_PICKS = BLOCK_CUTS | {"iter", "select", "unbind"}  # also of one entry along an axis
MOST_CHANGES = 8  # layouts and factors between a block of tokens and its product
MOST_SAMPLES = 32  # of what was made of the last contexts of some queries


class Place(NamedTuple):
    """Where a tensor lies in memory."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class KeyBlock(NamedTuple):
    """A product of exponentials of scores of some queries and keys with values: its own call, and the tokens it is of.

    bias and hidden are (b, h, q, k), with size 1 along what they do not depend on.
    """

    call: AttentionCall
    dims: Dims  # of the product
    groups: Groups
    query: Tensor
    keys: Tensor
    has_part_of_queries: bool  # whether these are some of the tokens of a longer tensor
    is_projected_alone: bool  # whether its queries or its keys were cut out of all tokens before a layer projected them
    bias: Tensor | None
    hidden: Tensor | None
    has_running_maximum: bool
    is_divided: bool  # whether its rows sum to 1
    has_picked_query: bool = False  # whether its query and its key were picked along one axis, one token each
    is_of_one_key: bool = False  # whether exponentials were multiplied with the value of one key entry by entry

    @property
    def needs_others(self) -> bool:
        """Whether it is a part of a sum, and no call of its own."""
        return self.has_running_maximum or self.is_of_one_key


@dataclass(eq=False)
class QueryRows:
    """A block of queries, its blocks of keys, and sampled rows of what was made of their contexts since the last of them."""

    frame: "weakref.ref[ModuleFrame]"
    query: Tensor
    sampled: Tensor
    blocks: list[KeyBlock] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)  # (b, h, n, e)


class BlockContext(NamedTuple):
    """The queries that a followed tensor has contexts of, or sums of several, with the first of each, and its axes."""

    parts: tuple[tuple[QueryRows, int], ...]
    dims: Dims
    groups: Groups  # whose queries are those of all parts
    blocks: Axes | None = None  # that contexts of several blocks of keys were stacked along, and are yet to be summed over


class KeyBlocks:
    """The blocks of keys of the modules that run."""

    def __init__(self, table: AxisTable) -> None:
        self.table = table
        self.rows: list[QueryRows] = []
        self.contexts = WeakTensorKeyDictionary()
        self.of_one_key = WeakTensorKeyDictionary()  # blocks, by their contexts

    def clear(self) -> None:
        """Forget all blocks."""
        self.rows.clear()
        self.contexts.clear()
        self.of_one_key.clear()

    def add(self, frame: ModuleFrame, block: KeyBlock, context: Tensor) -> None:
        """Add a block of a running module, with its context as the model has it."""
        place = find_place(block.query)
        rows = next((one for one in self.rows if one.frame() is frame and find_place(one.query) == place), None)
        if rows is None:
            n = block.call.q.shape[2]
            sampled = torch.linspace(0, n - 1, min(n, SAMPLED_ROWS), device=context.device).long()
            rows = QueryRows(weakref.ref(frame), block.query, sampled)
            self.rows.append(rows)
        rows.blocks.append(block)
        if block.is_of_one_key:
            self.of_one_key[context] = block
        rows.samples.clear()
        self.follow(context, BlockContext(((rows, 0),), block.dims, block.groups))

    def follow(self, x: Tensor, context: BlockContext) -> None:
        """Follow a tensor that was made of contexts, and keep its sampled rows."""
        self.contexts[x] = context
        if context.blocks is not None:
            return
        groups = context.groups
        four = self.table.arrange(x.detach(), context.dims, (groups.batch, groups.heads, groups.queries, groups.width))
        for rows, start in context.parts:
            rows.samples.append(four.index_select(2, rows.sampled + start))
            del rows.samples[:-MOST_SAMPLES]

    def follow_function(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow contexts through a function that keeps their entries, in this layout or another, rescaled or added up.

        It may also join those of several blocks of queries, or write them into parts of one tensor.
        """
        found = [one for one in find_tensors(args, kwargs) if one in self.contexts]
        if not found or not isinstance(result, Tensor):
            return
        x, core = found[-1], strip_affixes(name)
        if name in JOINS or core == "setitem":
            self.follow_joined(core, args, kwargs, found, result)
        elif core == "sum" and self.contexts[x].blocks is not None:
            self.follow_sum(self.contexts[x], args, kwargs, result)
        elif result.numel() == x.numel():
            context = self.contexts[x]
            dims = follow_dims(self.table, context.dims, name, func, args, kwargs, x, result)
            if dims is not None and (name in PERMUTES or core in VIEWS):
                self.contexts[result] = context._replace(dims=dims)
            elif dims is not None:
                self.follow(result, context._replace(dims=dims))

    def follow_sum(self, context: BlockContext, args: Any, kwargs: Any, y: Tensor) -> None:
        """Follow y, the sum over the blocks of keys that contexts were stacked along."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if type(dim) is int and context.dims[dim] == context.blocks:
            left = () if y.dim() < len(context.dims) else ((),)
            axis = dim % len(context.dims)
            self.follow(y, context._replace(dims=(*context.dims[:axis], *left, *context.dims[axis + 1 :]), blocks=None))

    def follow_joined(self, core: str, args: Any, kwargs: Any, found: list[Tensor], y: Tensor) -> None:
        """Follow y, which contexts were joined to along their queries, or written into."""
        first = self.contexts[found[-1]]
        if core == "stack" and len(found) == len(args[0]) and all(self.contexts[x].parts == first.parts for x in found):
            axis = kwargs.get("dim", args[1] if len(args) > 1 else 0) % y.dim()
            blocks = self.table.add_axis(len(found))
            dims = (*first.dims[:axis], blocks, *first.dims[axis:])
            self.contexts[y] = first._replace(dims=dims, blocks=blocks)
            return
        axis = next((n for n, axes in enumerate(first.dims) if axes == first.groups.queries), None)
        if axis is None or y.dim() != len(first.dims):
            return
        if core == "setitem":
            part, before = y[args[1]], self.contexts.get(y)
            start = (int(part.storage_offset()) - int(y.storage_offset())) // y.stride(axis)
            known = () if before is None else before.parts
            parts = (*(one for one in known if one[0] is not first.parts[0][0]), (first.parts[0][0], start))
        elif len(found) == len(args[0]):
            starts = accumulate((x.shape[axis] for x in found), initial=0)
            parts = tuple(
                (rows, n + start) for x, start in zip(found, starts, strict=False) for rows, n in self.contexts[x].parts
            )
        else:
            return
        queries = self.table.add_axis(y.shape[axis])
        dims = tuple(queries if n == axis else axes for n, axes in enumerate(first.dims))
        self.contexts[y] = BlockContext(parts, dims, first.groups._replace(queries=queries))

    def forget(self, context: Tensor) -> None:
        """Forget the block of one key with this context, which a sum completes to a call of its own."""
        block = self.of_one_key.pop(context, None)
        if block is not None:
            del self.contexts[context]
            for rows in self.rows:
                rows.blocks = [one for one in rows.blocks if one is not block]
            self.rows = [one for one in self.rows if one.blocks]

    def take_rows(self, frame: ModuleFrame) -> list[list[QueryRows]]:
        """Return the blocks of queries of a module that ends, together where they share blocks of keys, and forget them."""
        ended = [one for one in self.rows if one.frame() is frame]
        self.rows = [one for one in self.rows if one.frame() is not frame]
        found: list[tuple[set[Place], list[QueryRows]]] = []
        for rows in ended:
            places = {find_place(block.keys) for block in rows.blocks}
            others = [one for one in found if not one[0].isdisjoint(places)]
            found = [one for one in found if one not in others]
            found.append((places.union(*(one[0] for one in others)), [*(x for one in others for x in one[1]), rows]))
        return [rows for _, rows in found]


def has_running_maximum(trace: Trace) -> bool:
    """Return whether weights are exp(s - maximum(a, b)), with a maximum so far, as in a loop over blocks of keys."""
    return not MAXIMA_OF_TWO.isdisjoint(trace.changes)


def find_block(
    frames: list[ModuleFrame], table: AxisTable, trace: Trace, groups: Groups, dims: Dims, call: AttentionCall, is_divided: bool
) -> KeyBlock | None:
    """Return the block that a call is, of exponentials with a running maximum, or of a part of the keys; None if it is none.

    Raises UnreadableError if there is a running maximum and what is added to the scores is not a table.
    """
    last = trace.function if trace.activated is None else trace.activated.functions[-1]  # of the functions that made them
    if trace.form is None or trace.extent or last not in BASES or trace.undropped is not None:
        return None
    is_first = is_query_first(trace.form, table, groups)
    query, keys = (trace.form.a, trace.form.b) if is_first else (trace.form.b, trace.form.a)
    (query, made), (keys, made_keys) = (find_origin(frames[-1], x) for x in (query, keys))
    token, key = (find_token(frames[-1], one, n) for one, n in ((made, call.q.shape[2]), (made_keys, call.k.shape[2])))
    if not (has_running_maximum(trace) or key is not None or is_cut(frames[-1], keys, made_keys, call.k.shape[2])):
        return None
    has_part = is_part_of_tokens(frames[-1], query, made, call.q.shape[2])
    has_picked_query = token is not None and key is not None and token.axis == key.axis
    query, keys = query if token is None else token.tensor, keys if key is None else key.tensor
    is_alone = any(is_made_of_part(frames[-1], one) for one in (made, made_keys))
    _, _, parts = collect_parts(trace.form.drop_own(), table, groups)
    if parts.terms or call.sinks is not None:
        if has_running_maximum(trace):
            raise UnreadableError(OTHERWISE)
        return None
    bias, hidden = None, None
    shift = parts.shift if isinstance(parts.shift, Tensor) else torch.full((1, 1, 1, 1), parts.shift, device=call.q.device)
    for one in (*parts.biases, *([shift] if bool(shift.any()) else [])):
        bias = one if bias is None else bias + one
    for one, _ in parts.hidden:
        hidden = one if hidden is None else hidden | one
    has_maximum = has_running_maximum(trace)
    return KeyBlock(
        call, dims, groups, query, keys, has_part, is_alone, bias, hidden, has_maximum, is_divided, has_picked_query
    )


def find_origin(frame: ModuleFrame, x: Tensor) -> tuple[Tensor, TensorRef]:
    """Return the last tensor that is alive of those that x was made of by layouts, copies and factors, and the last of all."""
    made, size = weakref.ref(x), x.numel()
    for _ in range(MOST_CHANGES):
        makers = frame.find_makers(made)
        maker = makers[0] if len(makers) == 1 else None
        if maker is None or not (is_layout(maker) or strip_affixes(maker.name) in PRODUCTS | QUOTIENTS):
            break
        given = next((one for one, n in zip(maker.given, maker.sizes, strict=True) if n == size), None)
        if given is None or given is made:
            break
        made, tensor = given, given()
        x = x if tensor is None else tensor
    return x, made


def is_cut(frame: ModuleFrame, x: Tensor, made: TensorRef, count: int) -> bool:
    """Return whether x, made of the tensor `made`, is `count` tokens of another one that has more along that axis."""
    for maker in frame.find_makers(made):
        given = find_alive(frame, maker.given[0]) if maker.given and strip_affixes(maker.name) in BLOCK_CUTS else None
        if given is None or given.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            continue
        longer = {step for n, step in zip(given.shape, given.stride(), strict=True) if n > count}
        if any(n == count and step in longer for n, step in zip(x.shape, x.stride(), strict=True)):
            return True
    return False


class PickedToken(NamedTuple):
    """One token as a part of all tokens, with an axis of size 1, which is that axis from the last."""

    tensor: Tensor
    axis: int


def find_token(frame: ModuleFrame, made: TensorRef, count: int) -> PickedToken | None:
    """Return the one token that a tensor of `count` tokens is, if a number or an iteration picked it; None for another one."""
    for maker in frame.find_makers(made) if count == 1 else []:
        given, x = find_alive(frame, maker.given[0]) if maker.given and maker.along is not None else None, made()
        if given is None or x is None or maker.along is None or strip_affixes(maker.name) not in BLOCK_PICKS:
            continue
        axis, shape = maker.along
        start, left = divmod(int(x.storage_offset()) - int(given.storage_offset()), max(given.stride(axis), 1))
        is_same = given.shape == shape and given.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        if is_same and not left and shape[axis] > 1 and 0 <= start < shape[axis]:
            return PickedToken(given.narrow(axis, start, 1), axis - len(shape))
    return None


def is_part_of_tokens(frame: ModuleFrame, x: Tensor, made: TensorRef, count: int) -> bool:
    """Return whether x, made of the tensor `made`, is `count` tokens of a longer tensor, and not a head or a sample of it."""
    for maker in frame.find_makers(made):
        shapes = None if maker.shapes is None else (maker.shapes.given[0], maker.shapes.result)
        before, after = maker.layout[:2] if maker.name in SPLITS and maker.layout is not None else shapes or ((), ())
        if len(before) == len(after) and any(n > m >= count for n, m in zip(before, after, strict=True)):
            return True
    return is_cut(frame, x, made, count)


def is_made_of_part(frame: ModuleFrame, made: TensorRef) -> bool:
    """Return whether layers and layouts made a tensor of one that was cut out of another."""
    for n in range(MOST_CHANGES):
        makers = frame.find_makers(made)
        if len(makers) != 1 or not makers[0].given:
            return False
        if n and strip_affixes(makers[0].name) in BLOCK_PICKS:
            return True
        made = next((one for one in makers[0].given if frame.find_contents(one) == TOKEN), makers[0].given[0])
    return False


def find_alive(frame: ModuleFrame, ref: TensorRef) -> Tensor | None:
    """Return a tensor, or the one that it was a layout of if it was freed; None if that was freed too."""
    for _ in range(MOST_CHANGES):
        x, makers = ref(), frame.find_makers(ref)
        if x is not None or len(makers) != 1 or not is_layout(makers[0]):
            return x
        ref = makers[0].given[0]
    return None


def find_place(x: Tensor) -> Place:
    """Return where a tensor lies in memory."""
    return Place(x.untyped_storage().data_ptr(), int(x.storage_offset()), tuple(x.shape), x.stride())
