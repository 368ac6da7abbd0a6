"""Which axes of queries are tokens and which are heads that share keys, by the rows of what a layer has projected."""

import math
from typing import NamedTuple

from torch import Tensor

from regard.observe.interception.handwritten.projections import Projection, find_projection, has_features_last
from regard.observe.interception.handwritten.score_form import ScoreForm
from regard.observe.interception.handwritten.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.provenance import TOKEN, ModuleFrame


class RowAxes(NamedTuple):
    """The axes of a tensor that are rows of the projection it was made of, and those of them that are a batch."""

    rows: set[int]
    batch: set[int]


def share_keys(frames: list[ModuleFrame], table: AxisTable, form: ScoreForm) -> ScoreForm:
    """Return the form of scores whose keys are shared by axes of queries that are heads, of which tokens have several.

    An axis that holds tokens and heads is split. Nothing changes where no layer is known to have projected the queries.
    """
    for q, dims, of_keys in ((form.a, form.a_dims, form.b_dims), (form.b, form.b_dims, form.a_dims)):
        others, scores = list_axes(table, of_keys), list_axes(table, form.dims)
        own = [n for n, axes in enumerate(table.expand_dims(dims)) if axes and {*axes} <= scores - others]
        is_plain = len(own) == 1 and any(q.shape[own[0]] in x.shape for x in frames[-1].input_tensors)
        found = None if is_plain or not own else find_row_axes(frames, table, q, dims)
        if found is None:
            place = None if is_plain or q.dim() <= len(of_keys) else find_heads_beside_tokens(frames[-1], q, own)
            if place is not None:
                own_axes = {axis for n in own for axis in table.expand_axes(dims[n])}
                shared = [axis for axis in table.expand_axes(form.shared) if axis not in own_axes]
                return form._replace(shared=(*shared, *table.expand_axes(dims[place])))
            continue
        axes_of_queries = {axis for n in own for axis in table.expand_axes(dims[n])}
        rows = axes_of_queries & found.rows
        queries = rows - found.batch or rows
        if queries or (len(own) == 1 and found.rows == found.batch):  # a single token
            shared = [axis for axis in table.expand_axes(form.shared) if axis not in axes_of_queries]
            heads = [axis for axes in table.expand_dims(form.dims) for axis in axes if axis in axes_of_queries - queries]
            return form._replace(shared=(*shared, *heads))
    return form


def find_heads_beside_tokens(frame: ModuleFrame, q: Tensor, own: list[int]) -> int | None:
    """Return which of some dimensions of queries is that of heads, by their number or the lengths of the module's inputs.

    In DeepSeek's latent attention, keys (b, k, c) are those of all heads of queries (b, q, h, c). None if it is not known.
    """
    stated, lengths = find_head_counts(), {n for x in frame.input_tensors if x.dim() > 2 for n in x.shape[:-1]}
    are_stated, are_others = [n for n in own if q.shape[n] in stated], [n for n in own if q.shape[n] not in lengths]
    if len(own) == 1 and 1 not in lengths:
        are_others = []
    return next((found[0] for found in (are_stated, are_others) if len(found) == 1 and len(own) < 3), None)


def find_row_axes(frames: list[ModuleFrame], table: AxisTable, q: Tensor, dims: Dims) -> RowAxes | None:
    """Return the axes of queries that are rows of what a layer has projected, not features; None if they are not known.

    The axis of a dimension that holds rows and heads, which are features, is split.
    """
    projection = find_projection(frames, q) if q.numel() else None
    source = None if projection is None else find_source(projection)
    if projection is None or source is None:
        return None
    count, first = math.prod(source.shape[:-1]), source.shape[0] if source.dim() > 2 else 1
    order = sorted((n for n in range(q.dim()) if dims[n]), key=lambda n: projection.strides[n], reverse=True)
    found, total, outside = RowAxes(set(), set()), 1, 0
    for place, n in enumerate(order):
        if total == count:
            break
        axes: Axes | None = table.expand_axes(dims[n])
        size, stride = q.shape[n], projection.strides[n]
        if size * total > count and not count % total:
            if found.rows - found.batch:
                return None  # a layer that is split in error, whose code means an axis of tokens and one of heads
            width = math.prod(q.shape[m] for m in order[place + 1 :]) * min(projection.strides[m] for m in order)
            is_outer = stride == width  # the features of a head are next to those of the other heads
            size, stride = count // total, stride * (size * total // count if is_outer else 1)
            axes = cut_rows(table, dims[n], size, is_outer) if outside in (0, size * stride) else None
        if axes is None or outside not in (0, size * stride):
            return None  # rows that are not next to each other, as those of some tokens
        if total < first:
            found.batch.update(axes)
        found.rows.update(axes)
        total, outside = total * size, stride
    return found if total == count else None


def cut_rows(table: AxisTable, axes: Axes, size: int, is_outer: bool) -> Axes | None:
    """Return the outer or the inner part of a dimension with some axes, of a size; None if it cannot be cut so."""
    axes = table.expand_axes(axes)
    if len(axes) == 1 and not table.get_sizes(axes)[0] % size:
        axes = table.split_axis(axes[0], size if is_outer else table.get_sizes(axes)[0] // size)
    parts = (axes[:n] if is_outer else axes[n:] for n in range(1, len(axes)))
    return next((part for part in parts if math.prod(table.get_sizes(part)) == size), None)


def find_source(projection: Projection) -> Tensor | None:
    """Return the tokens (..., c) that a layer has projected with a matrix of weights; None for another one, or if freed."""
    maker, frame = projection.maker, projection.frame
    if not has_features_last(projection):
        return None
    tensors = [(one, one()) for one in (maker.given[:1] if maker.child is not None else maker.given)]
    tokens = [x for one, x in tensors if frame.find_contents(one) == TOKEN]
    weights = [x for one, x in tensors if frame.find_contents(one) != TOKEN]
    if len(tokens) != 1 or tokens[0] is None or tokens[0].dim() < 2:
        return None
    if maker.name == "einsum":
        is_matrix = not has_weights_of_heads(projection, tokens[0])
    else:
        is_matrix = all(x is not None and x.dim() < 3 for x in weights)
    return tokens[0] if is_matrix else None


def has_weights_of_heads(projection: Projection, x: Tensor) -> bool:
    """Return whether an einsum multiplies each head of x with weights of its own, so that heads are no rows of one layer."""
    y, sizes = projection.tensor(), projection.maker.sizes
    count = math.prod(x.shape[:-1])
    return y is not None and len(sizes) == 2 and sum(sizes) - x.numel() != y.numel() * x.shape[-1] // max(count, 1)


def list_axes(table: AxisTable, dims: Dims) -> set[int]:
    """Return all axes of a tensor, where those that were split are their parts."""
    return {axis for axes in table.expand_dims(dims) for axis in axes}
