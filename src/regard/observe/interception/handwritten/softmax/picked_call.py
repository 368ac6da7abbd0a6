"""The call of attention whose queries each pick keys by their scores, as top-k attention: what was picked is its mask."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from regard.mechanism.masks import Given
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.handwritten.ancestors.picked_tokens import PickedTokens
from regard.observe.interception.handwritten.products.head_guesses import count_tokens, split_heads
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable, Dims
from regard.observe.interception.handwritten.products.traces import PickedKeys, Trace
from regard.observe.interception.handwritten.scores.axis_groups import Groups, describe_choice, find_queries
from regard.observe.interception.handwritten.scores.score_formula import resolve_form
from regard.observe.interception.handwritten.softmax.edge_call import gather_first
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.plain_tensors import UnreadableError

POOLED = "it is top-k pooling, whose keys are the tokens of the largest scores"


def is_picked(weights: Trace, table: AxisTable, values: Dims) -> bool:
    """Return whether queries picked the keys of weights, and values with these axes were gathered for each of them."""
    if weights.picked is None or weights.dims is None:
        return False
    places = set(table.expand_axes(weights.picked.places))
    return all(places <= {axis for axes in table.expand_dims(dims) for axis in axes} for dims in (weights.dims, values))


def build_picked_call(
    weights: Trace, table: AxisTable, groups: Groups, tensor: Tensor, axes: Dims, value: Tensor, own: Dims, kernel: str
) -> tuple[AttentionCall, Tensor]:
    """Return the call of picked keys, whose mask is what was picked, and its weights (b, h, q, k).

    tensor and value are the weights and the gathered values, with their axes. Raises UnreadableError if a key has several
    values.
    """
    picked = weights.picked
    assert picked is not None
    four = (groups.batch, groups.heads, groups.queries, picked.places)
    weights_of_picked = table.arrange(tensor, axes, four)
    index = table.arrange(picked.indices, picked.dims, four).expand(weights_of_picked.shape)
    values_of_picked = table.arrange(value, own, (*four, groups.width))
    values_of_picked = values_of_picked.expand(*weights_of_picked.shape, -1)
    keys = math.prod(table.get_sizes(table.expand_axes(groups.keys)))
    flat, where = values_of_picked.flatten(2, 3), index.flatten(2)
    v = gather_first(flat, where, keys)
    again = v.detach().gather(2, where.unsqueeze(-1).expand_as(flat))
    if not torch.equal(again.nan_to_num(), flat.detach().nan_to_num()):
        raise UnreadableError("its keys have values that differ from query to query")
    whole = weights_of_picked.new_zeros(*weights_of_picked.shape[:3], keys)
    matrix = whole.scatter(3, index, weights_of_picked)
    mask = whole.bool().scatter_(3, index, torch.ones_like(index, dtype=torch.bool))
    call = resolve_form(picked.form, table, groups, kernel, v)
    queries, places = (torch.arange(n, device=mask.device) for n in mask.shape[2:])
    mask &= call.mask.block(queries, places, call.offset)
    note = (
        f"it is {describe_choice(weights.changes)} attention: which keys each query chose is stored as a table, "
        f"{mask.nbytes:,} bytes; values of keys that none chose are 0"
    )
    return replace(
        call, mask=Given.from_shared_table(mask), offset=0, note=note, can_use_cache=False, has_all_values=False
    ), matrix


def spread_keys(x: Tensor, picked: PickedTokens, dim: int) -> Tensor:
    """Return weights (b, h, 1, k) or values (b, h, k, d) of picked tokens as those of all along a dimension, 0 for the others.

    Raises UnreadableError if it is not known which tokens they are of, or if one was picked twice.
    """
    places = picked.places
    rows = None if places is None else places.expand(len(x), -1) if places.dim() == 1 or len(places) == 1 else places
    if rows is None or rows.shape != (len(x), x.shape[dim]) or any(len(one.unique()) < len(one) for one in rows):
        raise UnreadableError(f"{POOLED}, and where they are among all is not known")
    shape = [size if n in (0, dim % x.dim()) else 1 for n, size in enumerate(x.shape)]
    size = [picked.total if n == dim % x.dim() else size for n, size in enumerate(x.shape)]
    return x.new_zeros(size).scatter(dim, rows.view(shape).expand(x.shape), x)


def find_picked_groups(picked: PickedKeys, table: AxisTable, own: Dims) -> Groups:
    """Return the groups of axes of the scores that keys were picked from, and the width of values with these axes."""
    keys = table.expand_axes(picked.keys)
    queries = find_queries(picked.form, table, keys)
    if not queries:
        raise UnreadableError("its queries are not known")
    dims = table.expand_dims(picked.form.dims)
    batch = [tuple(axis for axis in axes if axis not in {*queries, *keys}) for axes in dims]
    before, heads = split_heads(table, [axes for axes in batch if axes], count_tokens(table, queries, keys), find_head_counts())
    axes_of_scores = {*keys, *queries, *before, *heads, *table.expand_axes(picked.places)}
    width = tuple(axis for axes in table.expand_dims(own) for axis in axes if axis not in axes_of_scores)
    return Groups(before, heads, queries, keys, width)
