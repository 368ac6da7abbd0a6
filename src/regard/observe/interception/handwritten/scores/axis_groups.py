"""The axes of a product of weights with values: which are batch, heads, queries and keys."""

import math
from typing import NamedTuple

from torch import Tensor

from regard.observe.interception.folded_heads import FoldedHeads, find_folded_heads
from regard.observe.interception.handwritten.ancestors.query_axes import find_row_axes, list_axes
from regard.observe.interception.handwritten.products.head_guesses import (
    count_tokens,
    describe_guess,
    find_joined_heads,
    split_grouped_heads,
)
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.score_form import CHOOSES_BY_VALUE, ScoreForm
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.plain_tensors import UNFOLLOWED, UnreadableError
from regard.observe.interception.thread_state import STATE


class Groups(NamedTuple):
    """The axes of batch, heads, queries, keys and the width of values."""

    batch: Axes
    heads: Axes
    queries: Axes
    keys: Axes
    width: Axes
    guess: str = ""  # a note if batch and heads were guessed and may be exchanged

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
    rows = [axes for label, axes in zip(labels, own, strict=True) if label in product.result]
    row_axes = [axes for axes in rows if axes]
    form = weights.form
    if form is None and weights.activated is not None and weights.dims is not None:
        activated = weights.activated.form  # unless weights were cut or moved since
        form = activated if list_axes(table, activated.dims) == list_axes(table, weights.dims) else None
    queries = find_queries(form, table, keys)
    if queries is not None and not other >= set(queries):  # where the batch shares its keys, only queries and values have it
        queries = tuple(axis for axis in queries if axis not in other)
    if queries is None:
        queries = next((axes for axes in reversed(row_axes) if not set(axes) & other), ())
    choice = describe_choice(weights.changes)
    if other & set(queries) or (choice and not queries and row_axes):
        raise UnreadableError(UNFOLLOWED)
    rest = [tuple(axis for axis in axes if axis not in queries) for axes in rows]
    batch = [left for axes, left in zip(rows, rest, strict=True) if left or not axes]
    if not queries and () in batch:  # a single query, behind a single batch row if both are there
        del batch[len(batch) - 1 - batch[::-1].index(())]
    given = [axes for axes in batch if axes]
    tokens = count_tokens(table, queries, keys)
    values = product.operands[1 - place], dims[1 - place]
    found, is_within = None, bool(keys) and attends_within_tokens(table, keys, *values)
    batch, given, (own_of_values,) = ([*map(table.expand_axes, one)] for one in (batch, given, [(*other,)]))  # split by that
    other = {*own_of_values}
    if not is_within:
        tensors = [] if form is None else [(form.a, form.a_dims), (form.b, form.b_dims)]
        projected = [one for one in tensors if not list_axes(table, one[1]).intersection(keys)]  # the queries
        found = split_projected(table, given, queries, keys, other, [*projected, values])
    if found is not None:
        queries = tuple(axis for axis in table.expand_axes(queries) if axis not in found[1])
    elif (found := join_queries_to_heads(table, batch, queries, other)) is not None:
        queries = ()
    else:
        found = split_as_made(table, given, *values)
    guess = ""
    if found is None:
        found = split_grouped_heads(table, batch, other, tokens)
        guess = describe_guess(table, given, *found)
    before, heads = found
    if folded := find_folded_queries(table, queries, heads):
        heads, queries = (*heads, *folded), tuple(axis for axis in table.expand_axes(queries) if axis not in folded)
    keys = table.expand_axes(keys)
    width = tuple(axis for axes in table.expand_dims(dims[1 - place]) for axis in axes if axis not in {*keys, *before, *heads})
    return Groups(before, heads, queries, keys, width, guess)


def find_folded_queries(table: AxisTable, queries: Axes, heads: Axes) -> Axes:
    """Return the axis of queries that is one of heads that share keys, folded with tokens into one dimension; none if none is.

    With it there are as many heads as a module states, and without it there are not; the other axis is as long as an input.
    """
    axes, stated = table.expand_axes(queries), find_head_counts()
    count = math.prod(table.get_sizes(table.expand_axes(heads)))
    if len(axes) not in (1, 2) or not stated or count == max(stated):
        return ()
    lengths = {n for x in STATE.frames[-1].input_tensors if x.dim() > 2 for n in x.shape[1:-1]}
    sizes = table.get_sizes(axes)
    found = [n for n, size in enumerate(sizes) if size * count == max(stated) and math.prod(sizes) // size in lengths]
    return (axes[found[0]],) if len(found) == 1 else ()


def attends_within_tokens(table: AxisTable, keys: Axes, v: Tensor, dims: Dims) -> bool:
    """Return whether keys are features of what a layer has projected: heads of a token attend to each other."""
    found = find_row_axes(STATE.frames, table, v, dims)
    return found is not None and found.rows.isdisjoint(table.expand_axes(keys))


def split_projected(
    table: AxisTable, given: list[Axes], queries: Axes, keys: Axes, other: set[int], tensors: list[tuple[Tensor, Dims]]
) -> tuple[Axes, Axes] | None:
    """Return which axes are of batch and of heads, by the rows of what a layer has projected to one of some tensors.

    Heads that share values, which have the axes `other`, are the last ones. None if no such layer is known.
    """
    for x, dims in tensors:
        if not {axis for axes in given for axis in axes} <= list_axes(table, dims):
            continue
        found = find_row_axes(STATE.frames, table, x, dims, (*queries, *keys), tuple(axis for axes in given for axis in axes))
        if found is not None:
            axes = table.expand_axes(tuple(axis for axes in given for axis in axes))
            own = table.expand_axes(queries) if set(queries) <= list_axes(table, dims) else ()
            own = own if found.rows <= {*axes} else ()  # of rows with a single query each
            heads = sorted((*(axis for axis in axes if axis not in found.rows), *own), key=lambda axis: axis not in other)
            return tuple(axis for axis in axes if axis in found.rows), tuple(heads)
    return None


def split_as_made(table: AxisTable, given: list[Axes], x: Tensor, dims: Dims) -> tuple[Axes, Axes] | None:
    """Return which axes are of batch and of heads, by the functions that made x with axes `dims`; None if none show it."""
    own = table.expand_dims(dims)
    places = tuple(own.index(axes) for axes in given if axes in own)
    folded = find_folded_heads(STATE.frames, x, places) if len(given) == len(places) in (1, 2) else None
    if folded is None or (len(places) == 1 and places[0] and folded.heads == 1 and not any(own[: places[0]])):
        return None  # behind a batch of one row, what a layer has projected may be heads
    return split_folded_heads(table, given, folded)


def join_queries_to_heads(table: AxisTable, batch: list[Axes], queries: Axes, other: set[int]) -> tuple[Axes, Axes] | None:
    """Return the axes of batch and of heads where `queries` are heads, which share keys that each token has for itself.

    Keys have the axes `other`. None unless queries make a number of heads that a module states, alone or with one axis behind
    the first, and nothing else does.
    """
    head_counts, count = find_head_counts(), math.prod(table.get_sizes(queries))
    sizes = [math.prod(table.get_sizes(axes)) for axes in batch]
    has_heads = any(size in head_counts for size in sizes[1:]) or find_joined_heads(sizes, head_counts)
    if len(batch) < 2 or count == 1 or has_heads:
        return None
    place = next((n for n, size in enumerate(sizes) if n and size > 1 and size * count in head_counts), None)
    has_tokens = any(other.intersection(axes) for n, axes in enumerate(batch) if n not in (0, place))
    if not has_tokens or (place is None and count not in head_counts):
        return None
    heads = () if place is None else batch[place]
    return tuple(axis for n, axes in enumerate(batch) if n != place for axis in axes), (*heads, *queries)


def split_folded_heads(table: AxisTable, given: list[Axes], folded: FoldedHeads) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads of one dimension that holds both, or of the two that hold one each.

    Raises UnreadableError if the dimension was split otherwise before.
    """
    parts = given
    if len(given) == 1:
        size = math.prod(table.get_sizes(given[0]))
        if folded.heads in (1, size):
            return (given[0], ()) if folded.heads < size else ((), given[0])
        outer = folded.heads if folded.is_before else size // folded.heads
        parts = [given[0][:1], given[0][1:]]
        if not parts[1]:
            parts = [(axis,) for axis in table.split_axis(given[0][0], outer)]
        elif table.get_sizes(parts[0]) != [outer]:
            raise UnreadableError(UNFOLLOWED)
    return (parts[1], parts[0]) if folded.is_before else (parts[0], parts[1])


def find_queries(form: ScoreForm | None, table: AxisTable, keys: Axes) -> Axes | None:
    """Return the axes that only the operand of a score product without the keys has; None if the product is not known."""
    if form is None:
        return None
    a, b, scores = (
        [axis for axes in table.expand_dims(dims) for axis in axes] for dims in (form.a_dims, form.b_dims, form.dims)
    )
    is_second = bool({*keys} & {*a}) or not (keys or {*scores} & {*a} - {*b})  # of one key, queries have what one has alone
    mine, theirs = (b, a) if is_second else (a, b)
    if set(keys) & set(mine):
        raise UnreadableError(UNFOLLOWED)
    shared = table.expand_axes(form.shared)
    return tuple(axis for axis in scores if axis in mine and axis not in theirs and axis not in shared)


def describe_choice(changes: tuple[str, ...]) -> str:
    """Return what attention is called whose scores were put in an order of their values; nothing for any other."""
    return "top-k" if "topk" in changes else "sorted" if CHOOSES_BY_VALUE & set(changes) else ""
