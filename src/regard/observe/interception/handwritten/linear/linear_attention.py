"""Linear attention written out by hand: keys are multiplied with values first, and queries with the sums over all keys.

``o_i = r_i q_iᵀ Σ_j k_j v_jᵀ`` has the matrix ``M_ij = r_i q_i · k_j``, of queries and keys as a feature map made them; with a
running sum over the keys, later keys have 0. r_i is what the layer multiplied its row by, as one over the sum of the weights.
"""

import math
import weakref
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.feature_maps import has_fewer_rows
from regard.observe.interception.handwritten.ancestors.layouts import skip_layouts
from regard.observe.interception.handwritten.ancestors.projections import Projection, find_projection, has_features_last
from regard.observe.interception.handwritten.ancestors.query_axes import list_axes
from regard.observe.interception.handwritten.ancestors.row_provenance import find_places_of_argument
from regard.observe.interception.handwritten.products.head_guesses import count_tokens
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, Labels
from regard.observe.interception.handwritten.products.score_form import ScoreForm, StepKind
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.scores.axis_groups import split_batch
from regard.observe.interception.provenance import TOKEN, ModuleFrame

TITLE = "linear attention"


class ChainRoles(NamedTuple):
    """The queries, keys and values of two products in a row, with their axes; queries and keys are multiplied over features.

    `dims` are the axes of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_dims: Dims
    k_dims: Dims
    v_dims: Dims
    features: set[int]
    keys: set[int]
    dims: Dims
    is_causal: bool
    is_masked: bool = False  # whether the scores of some pairs of queries and keys are 0


def find_roles(table: AxisTable, form: ScoreForm, q: Tensor, q_dims: Dims, dims: Dims) -> ChainRoles | None:
    """Return the roles of the operands of a form's product and of q, by which this was multiplied; None if they have none.

    `dims` are the axes of the last product. The axis that this sums is one of the keys alone, and the first one or a running
    sum sums that of the tokens.
    """
    features = list_axes(table, q_dims) - list_axes(table, dims)
    a, b = list_axes(table, form.a_dims), list_axes(table, form.b_dims)
    keys = (a & b) - list_axes(table, form.dims)
    for step in form.steps:
        keys |= list_axes(table, step.dims) if step.kind is StepKind.CUMSUM else set()
    sides = (form.a, form.a_dims, a), (form.b, form.b_dims, b)
    for (k, k_dims, own), (v, v_dims, others) in permutations(sides):
        if features and features <= own - others:
            return ChainRoles(q, k, v, q_dims, k_dims, v_dims, features, keys, dims, bool(keys & list_axes(table, dims)))
    return None


def is_attention(frames: list[ModuleFrame], table: AxisTable, roles: ChainRoles) -> bool:
    """Return whether roles are those of attention: no products of matrices, no generated weights, values that queries share."""
    is_product = is_matrix_power(roles) or multiplies_rows_and_columns(frames, table, roles)
    return not (is_product or has_values_of_each_query(table, roles) or are_keys_generated(frames, table, roles))


def multiplies_rows_and_columns(frames: list[ModuleFrame], table: AxisTable, roles: ChainRoles) -> bool:
    """Return whether parts of one projection have tokens as rows in one part and as columns in another: matrices in a row."""
    orders: dict[int, bool] = {}  # whether tokens are rows, by the projection
    for projection, are_rows in list_token_orders(frames, table, roles):
        if projection is None or are_rows is None:
            continue
        if orders.setdefault(id(projection.tensor), are_rows) != are_rows:
            return True
    return False


def are_projected_tokens(frames: list[ModuleFrame], table: AxisTable, roles: ChainRoles, may_share: bool = False) -> bool:
    """Return whether layers made queries, keys and values, three tensors, each with the tokens that the products have as rows.

    One of them may be an argument of the module. So it is in linear self-attention. https://arxiv.org/abs/2212.07677
    With `may_share`, keys and values may be one tensor, as in x W xᵀ x, whose scores are of pairs of tokens.
    """
    parts, orders = (roles.q, roles.k, roles.v), list_token_orders(frames, table, roles)
    are_last = {has_features_last(projection) for projection, _ in orders if projection is not None}
    count = len({x.data_ptr() for x in parts})
    is_shared = may_share and count == 2 and roles.k.data_ptr() == roles.v.data_ptr()
    if not (count == 3 or is_shared) or len(are_last) != 1 or {are_rows for _, are_rows in orders} != are_last:
        return False
    others = [weakref.ref(x) for x, (projection, _) in zip(parts, orders, strict=True) if projection is None]
    frame, most = frames[-1], 2 if is_shared else 1
    are_arguments = all(frame.find_contents(one) == TOKEN and not skip_layouts(frame, one) for one in others)
    return len(others) <= most and are_arguments


def list_token_orders(
    frames: list[ModuleFrame], table: AxisTable, roles: ChainRoles
) -> list[tuple[Projection | None, bool | None]]:
    """Return what made queries, keys and values, and whether the tokens of each are its rows; None where that is not known."""
    queries = list_axes(table, roles.q_dims) & list_axes(table, roles.dims) - list_axes(table, roles.k_dims)
    width = list_axes(table, roles.v_dims) & list_axes(table, roles.dims) - list_axes(table, roles.k_dims)
    parts = (
        (roles.q, roles.q_dims, queries, roles.features),
        (roles.k, roles.k_dims, roles.keys, roles.features),
        (roles.v, roles.v_dims, roles.keys, width),
    )
    orders: list[tuple[Projection | None, bool | None]] = []
    for x, dims, tokens, features in parts:
        projection = find_projection(frames, x)
        strides = x.stride() if projection is None else projection.strides
        of_tokens, of_features = (find_stride(table, strides, dims, axes) for axes in (tokens, features))
        are_rows = None if of_tokens is None or of_features is None else of_tokens > of_features
        orders.append((projection, are_rows))
    return orders


def sums_features(frames: list[ModuleFrame], product: LabelledProduct, x: Tensor) -> bool:
    """Return whether a product sums its operand x over features that a layer has made, as of keys, and not over tokens."""
    projection = find_projection(frames, x)
    is_last = None if projection is None else has_features_last(projection)
    if projection is None or is_last is None:
        return False
    own = [*zip(product.labels[product.find_place(x)], projection.strides, x.shape, strict=True)]
    summed = [stride for label, stride, size in own if label not in product.result and size > 1]
    kept = [stride for label, stride, size in own if label in product.list_rows(product.find_place(x)) and size > 1]
    return bool(summed and kept) and ((max(summed) < min(kept)) if is_last else (min(summed) > max(kept)))


def find_stride(table: AxisTable, strides: Sequence[int], dims: Dims, axes: set[int]) -> int | None:
    """Return the least stride of the dimensions of a tensor with some axes; None if it has none of them."""
    own = zip(strides, table.expand_dims(dims), strict=True)
    return min((stride for stride, one in own if axes & set(one)), default=None)


def has_values_of_each_query(table: AxisTable, roles: ChainRoles) -> bool:
    """Return whether each query has values of its own, or keys have rows that neither queries nor values have.

    So it is where a matrix of each point, a sum of matrices with its own weights, is multiplied with the point.
    """
    q, k, v = (list_axes(table, dims) for dims in (roles.q_dims, roles.k_dims, roles.v_dims))
    of_output = list_axes(table, roles.dims) - roles.features - roles.keys
    own = (q & of_output) - k
    return bool((k & of_output) - q - v) or (bool(own & v) and own <= v)


def mixes_within_tokens(frames: list[ModuleFrame], product: LabelledProduct, labels: Labels) -> bool:
    """Return whether the rows with these labels are parts of each token, as the streams of hyper-connections.

    So it is where a product has a matrix for each token of an input, ids (b, t) or (b, t, c), and no input has as many rows, or
    for each of the tokens of an argument (b s, t, c), whose s streams it sums.
    """
    batch = [label for label in product.result if all(label in one for one in product.labels)]
    count, rows = (math.prod(map(product.get_size, one)) for one in (batch, labels))
    inputs = (x for frame in frames for x in frame.input_tensors)
    shapes = [x.shape for x in inputs if x.dim() == 3 or (x.dim() == 2 and not x.is_floating_point())]
    summed = {label for one in product.labels for label in one if label not in product.result}
    streams = math.prod(map(product.get_size, summed))
    if any(rows not in shape[1:] and count * streams == shape[0] * shape[1] for shape in shapes) and streams > 1:
        own = [(x, one) for x, one in zip(product.operands, product.labels, strict=True) if summed <= {*one}]
        if any(find_places_of_argument(frames[-1], x, [one.index(label) for label in summed]) == {0} for x, one in own):
            return True
    are_tokens = any(rows in (shape if rows > 1 else shape[1:]) for shape in shapes)  # a batch of 1 is no token
    return not are_tokens and any(count == shape[0] * shape[1] for shape in shapes)


def are_keys_generated(frames: list[ModuleFrame], table: AxisTable, roles: ChainRoles) -> bool:
    """Return whether keys were made of fewer tokens than there are keys, as weights are that a hypernetwork generates."""
    keys, rest = select_axes(table, roles.k_dims, roles.keys), roles.features | roles.keys
    others = [tuple(axis for axis in axes if axis not in rest) for axes in table.expand_dims(roles.k_dims)]
    batch, _ = split_batch(table, [axes for axes in others if axes], roles.k, roles.k_dims, count_tokens(table, keys))
    return has_fewer_rows(frames, roles.k, math.prod(table.get_sizes(table.expand_axes((*batch, *keys)))))


def is_matrix_power(roles: ChainRoles) -> bool:
    """Return whether queries are the keys transposed, or keys the values: a matrix that is applied repeatedly."""
    q, k, v = (roles.q, roles.q_dims), (roles.k, roles.k_dims), (roles.v, roles.v_dims)
    return is_transposed(*q, *k, roles.features) or is_transposed(*k, *v, roles.keys)


def is_transposed(x: Tensor, x_dims: Dims, y: Tensor, y_dims: Dims, axes: set[int]) -> bool:
    """Return whether x is y, or a part of the same tensor, transposed: with the same axes along other dimensions."""
    first, second = (
        [stride for stride, own in zip(one.stride(), dims, strict=True) if axes & set(own)]
        for one, dims in ((x, x_dims), (y, y_dims))
    )
    try:
        return first != second and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor without storage, as those of torch.func
        return False


def has_moved_axes(table: AxisTable, form: ScoreForm, dims: Dims) -> bool:
    """Return whether a tensor with these axes has one that neither operand of its form has, as where entries were moved."""
    return not list_axes(table, dims) <= list_axes(table, form.a_dims) | list_axes(table, form.b_dims)


def select_axes(table: AxisTable, dims: Dims, axes: set[int]) -> Axes:
    """Return those of some axes that a tensor has, in its order."""
    return tuple(axis for one in table.expand_dims(dims) for axis in one if axis in axes)
