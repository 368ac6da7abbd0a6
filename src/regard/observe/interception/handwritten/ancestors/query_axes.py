"""Which axes of queries are tokens and which are heads that share keys, by the rows of what a layer has projected."""

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.row_provenance import RowAxes, RowSearch
from regard.observe.interception.handwritten.products.score_form import ScoreForm
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.provenance import ModuleFrame


def share_keys(frames: list[ModuleFrame], table: AxisTable, form: ScoreForm) -> ScoreForm:
    """Return the form of scores whose keys are shared by axes of queries that are heads, of which tokens have several.

    An axis that holds tokens and heads is split. Nothing changes where no layer is known to have projected the queries.
    """
    inputs = frames[-1].input_tensors
    for q, dims, of_keys in ((form.a, form.a_dims, form.b_dims), (form.b, form.b_dims, form.a_dims)):
        others, scores = list_axes(table, of_keys), list_axes(table, form.dims)
        own = [n for n, axes in enumerate(table.expand_dims(dims)) if axes and {*axes} <= scores - others]
        is_plain = len(own) == 1 and any(x.dim() == 3 and x is not q and q.shape[own[0]] == x.shape[1] for x in inputs)
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


def find_row_axes(
    frames: list[ModuleFrame], table: AxisTable, q: Tensor, dims: Dims, tokens: Axes = (), others: Axes = ()
) -> RowAxes | None:
    """Return the axes of queries that are rows of what a layer has projected, not features; None if they are not known.

    The axis of a dimension that holds rows and heads, which are features, is split. With the axes of tokens, and those of batch
    and heads, rows of an argument of the model are known too.
    """
    return RowSearch(table, tokens, others).find(frames, q, dims) if q.numel() else None


def list_axes(table: AxisTable, dims: Dims) -> set[int]:
    """Return all axes of a tensor, where those that were split are their parts."""
    return {axis for axes in table.expand_dims(dims) for axis in axes}
