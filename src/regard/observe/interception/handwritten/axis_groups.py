"""The axes of a product of weights with values: which are batch, heads, queries and keys."""

import math
from typing import Any, NamedTuple

import torch

from regard.observe.interception.handwritten.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.score_form import CHOOSES_BY_VALUE, ScoreForm
from regard.observe.interception.handwritten.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.traces import Trace
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.thread_state import STATE

HEADS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads", "num_head"),
    *("query_heads", "num_query_heads", "n_query_heads"),
)
NAMES = frozenset(HEADS)


class Groups(NamedTuple):
    """The axes of batch, heads, queries, keys and the width of values."""

    batch: Axes
    heads: Axes
    queries: Axes
    keys: Axes
    width: Axes

    @property
    def matrix(self) -> Dims:
        """The axes of a matrix of weights."""
        return self.batch, self.heads, self.queries, self.keys


def find_groups(
    product: LabelledProduct, place: int, weights: Trace, table: AxisTable, dims: tuple[Dims, Dims, Dims]
) -> Groups:
    """Return the groups of axes of a product of weights, its operand at a place, with values.

    Raises UnreadableError if they are not those of attention.
    """
    own = table.expand_dims(dims[place])
    other = {axis for axes in table.expand_dims(dims[1 - place]) for axis in axes}
    labels = product.labels[place]
    keys = tuple(axis for label, axes in zip(labels, own, strict=True) if label not in product.result for axis in axes)
    row_axes = [axes for label, axes in zip(labels, own, strict=True) if label in product.result and axes]
    queries = find_queries(weights.form, table, keys)
    if queries is None:
        queries = next((axes for axes in reversed(row_axes) if not set(axes) & other), ())
    choice = describe_choice(weights.changes)
    if other & set(queries) or (choice and not queries and row_axes):
        raise UnreadableError(f"its values differ from query to query{f': it is {choice} attention' if choice else ''}")
    rows = [axes for label, axes in zip(labels, own, strict=True) if label in product.result]
    rest = [tuple(axis for axis in axes if axis not in queries) for axes in rows]
    batch = [left for axes, left in zip(rows, rest, strict=True) if left or not axes]
    if not queries and () in batch:  # a single query, behind a single batch row if both are there
        del batch[len(batch) - 1 - batch[::-1].index(())]
    before, heads = split_grouped_heads(table, batch, other, count_tokens(table, queries, keys))
    width = tuple(axis for axes in table.expand_dims(dims[1 - place]) for axis in axes if axis not in {*keys, *before, *heads})
    return Groups(before, heads, queries, keys, width)


def find_queries(form: ScoreForm | None, table: AxisTable, keys: Axes) -> Axes | None:
    """Return the axes that only the operand of a score product without the keys has; None if the product is not known."""
    if form is None:
        return None
    a, b, scores = (
        [axis for axes in table.expand_dims(dims) for axis in axes] for dims in (form.a_dims, form.b_dims, form.dims)
    )
    mine, theirs = (a, b) if not set(keys) & set(a) else (b, a)
    if set(keys) & set(mine):
        raise UnreadableError("its keys differ from query to query")
    shared = table.expand_axes(form.shared)
    return tuple(axis for axis in scores if axis in mine and axis not in theirs and axis not in shared)


def split_grouped_heads(table: AxisTable, batch: list[Axes], other: set[int], tokens: set[int]) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads, with heads that share values last.

    `batch` are the dimensions of weights but those of queries and keys, without axes where their size is 1; `other` are axes of
    values. Axes that the values lack are of heads if they and the axis of heads make a number of heads that a module states, or
    if none states any and they stand behind the dimensions of batch and heads.
    """
    shared = [axes for axes in batch if axes and not set(axes) & other]
    own = [axes for axes in batch if axes not in shared]
    if shared and len(own) > 1:
        before, heads = split_heads(table, own, tokens)
        grouped, head_counts = tuple(axis for axes in (heads, *shared) for axis in axes), find_head_counts()
        if math.prod(table.get_sizes(grouped)) in head_counts or (not head_counts and batch == [*own, *shared]):
            return before, grouped
    return split_heads(table, [axes for axes in batch if axes], tokens)


def split_heads(table: AxisTable, batch: list[Axes], tokens: set[int]) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads among the dimensions that are neither queries nor keys."""
    sizes = [math.prod(table.get_sizes(axes)) for axes in batch]
    head_counts = find_head_counts()
    if len(batch) == 1:
        return split_single(table, batch[0], head_counts, tokens)
    fits = [n for n, size in enumerate(sizes) if size in head_counts and n]
    if not head_counts and len(batch) == 2:
        shape = find_input_shape(3)
        fits = [n for n in (0, 1) if shape is not None and sizes[1 - n] in shape[:2] and sizes[n] not in shape[:2]]
    heads = fits[0] if len(fits) == 1 else len(batch) - 1
    return tuple(axis for n, axes in enumerate(batch) if n != heads for axis in axes), batch[heads] if batch else ()


def count_tokens(table: AxisTable, *groups: Axes) -> set[int]:
    """Return the numbers of tokens of groups of axes."""
    return {math.prod(table.get_sizes(axes)) for axes in groups}


def split_single(table: AxisTable, axes: Axes, head_counts: list[int], tokens: set[int]) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads in a dimension that may hold both, as that of bmm.

    The number of heads is one that a module states and that leaves a batch of its input, or what the batch of the input leaves.
    The batch of an input (1, b, c), such as the state of a recurrent layer, is its second axis, unless that may be tokens.
    """
    size = math.prod(table.get_sizes(axes))
    shape = find_input_shape()
    if shape is None:
        return ((), axes) if any(x.dim() > 1 for frame in STATE.frames for x in frame.input_tensors) else (axes, ())
    heads = next((n for n in head_counts if size % n == 0 and size // n in shape[:2]), 0)
    if not heads and shape[0] == 1 and size == shape[1] and size not in tokens:
        return axes, ()
    heads = heads or (size // shape[0] if shape[0] and size % shape[0] == 0 else 1)
    for n in range(len(axes) + 1):
        if math.prod(table.get_sizes(axes[n:])) == heads:
            return axes[:n], axes[n:]
    if len(axes) > 1:
        return axes, ()
    outer, inner = table.split_axis(axes[0], size // heads)
    return (outer,), (inner,)


def find_input_shape(most: int = 0) -> torch.Size | None:
    """Return the shape of the first input with a batch of the running modules, of the innermost first; None without one.

    With `most`, only of inputs of floating-point numbers with so many axes at most.
    """
    inputs = (x for frame in reversed(STATE.frames) for x in frame.input_tensors if x.dim() > 2)
    return next((x.shape for x in inputs if not most or (x.dim() <= most and x.is_floating_point())), None)


def find_head_counts() -> list[int]:
    """Return the numbers of heads that the running modules state, of the innermost first."""
    counts = []
    for frame in reversed(STATE.frames[-3:]):
        own = vars(frame.module)
        for attributes in (own, read_attributes(own.get("config"))):
            stated = sorted(NAMES & attributes.keys(), key=HEADS.index)
            counts += [n for name in stated if type(n := attributes[name]) is int and n > 1]
    return counts


def read_attributes(config: object) -> dict[str, Any]:
    """Return the attributes of an object, without a `__getattribute__` of its own, which is slow in a configuration."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(config, "__dict__")
    except AttributeError:
        return {}
    return attributes


def describe_choice(changes: tuple[str, ...]) -> str:
    """Return what attention is called whose scores were put in an order of their values; nothing for any other."""
    return "top-k" if "topk" in changes else "sorted" if CHOOSES_BY_VALUE & set(changes) else ""
