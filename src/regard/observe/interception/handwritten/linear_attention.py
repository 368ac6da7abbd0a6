"""Linear attention written out by hand: keys are multiplied with values first, and queries with the sums over all keys.

``o_i = r_i q_iᵀ Σ_j k_j v_jᵀ`` has the matrix ``M_ij = r_i q_i · k_j``, of queries and keys as a feature map made them; with a
running sum over the keys, later keys have 0. r_i is what the layer multiplied its row by, as one over the sum of the weights.
"""

import math
import weakref
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import IDENTITY, ScoredMatrix
from regard.mechanism.scores import score_dtype
from regard.observe.interception.handwritten.ancestor_search import (
    Projection,
    find_projection,
    has_features_last,
    has_fewer_rows,
)
from regard.observe.interception.handwritten.axis_groups import count_tokens, split_batch
from regard.observe.interception.handwritten.edge_softmax import skip_layouts
from regard.observe.interception.handwritten.labelled_product import LabelledProduct, Labels
from regard.observe.interception.handwritten.score_form import ScoreForm, ScoreStep, StepKind
from regard.observe.interception.handwritten.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.traces import Trace
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import TOKEN, ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, sample_state
from regard.observe.interception.thread_state import STATE

CHANGED = "it is linear attention, whose products of keys with values are changed by {} before queries are multiplied with them"
TITLE = "linear attention"
SAMPLED_ROWS = 4  # of each matrix, compared with the layer's own output
ROUNDINGS = 16  # of an output, relative to the sum of the sizes of its terms


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


@dataclass(eq=False)
class LinearCall:
    """A call of linear attention: q, k (b, h, n, d), v (b, h, n, e), and the output as far as it was followed.

    columns are those of the values that the output has; row_scale is (b, h, q).
    """

    kernel: str
    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    outputs: Tensor
    columns: Tensor
    row_scale: Tensor
    eps: float

    def read(self) -> RecurrenceCall:
        """Return the call in terms of a recording. Raises UnreadableError if its formula differs from the layer's output."""
        values = self.v.detach()[..., self.columns].contiguous()
        q, k, n, t = self.q.detach(), self.k.detach(), self.q.shape[2], self.k.shape[2]
        self.compare_output(values)
        row_scale = None if bool((self.row_scale == 1).all()) else self.row_scale.to(score_dtype(q.dtype))
        mechanism: LinearRecurrence | ScoredMatrix
        if self.is_causal:
            mechanism = LinearRecurrence(decay=k.new_zeros(1, 1, 1, 1), q=q, k=k, gate=row_scale)
        else:
            mechanism = ScoredMatrix(q=q, k=k, activation=IDENTITY, row_scale=row_scale, title=TITLE)
        factors = RecurrenceFactors(mechanism, values, self.outputs, sample_state(values))
        initial = sample_state(values[:, :, : t - n]) if 0 < n < t else None
        return RecurrenceCall(self.kernel, initial, lambda: factors, must_continue=False)

    def compare_output(self, values: Tensor) -> None:
        """Compare sampled rows of the matrix times values with the layer's output. Raises UnreadableError if they differ."""
        n, t = self.q.shape[2], self.k.shape[2]
        rows = torch.linspace(0, n - 1, min(n, SAMPLED_ROWS), device=self.q.device).long()
        seen = torch.arange(t, device=rows.device) <= rows.unsqueeze(-1) if self.is_causal else rows.new_ones(1).bool()
        q, k, v = self.q.detach()[:, :, rows].double(), self.k.detach().double(), values.double()
        scale = self.row_scale[:, :, rows].double().unsqueeze(-1)
        found = (q @ k.mT).masked_fill_(~seen, 0) @ v * scale
        size = (q.abs() @ k.abs().mT).masked_fill_(~seen, 0) @ v.abs() * scale.abs()
        difference = (found - self.outputs[:, :, rows].double()).abs()
        if bool((difference > ROUNDINGS * self.eps * size).any()):  # not where the layer's own output is NaN
            raise UnreadableError(f"its formula differs from its output by {float(difference.nan_to_num(0).amax()):.2g}")


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


def are_projected_tokens(frames: list[ModuleFrame], table: AxisTable, roles: ChainRoles) -> bool:
    """Return whether layers made queries, keys and values, three tensors, each with the tokens that the products have as rows.

    One of them may be an argument of the module. So it is in linear self-attention. https://arxiv.org/abs/2212.07677
    """
    parts, orders = (roles.q, roles.k, roles.v), list_token_orders(frames, table, roles)
    are_last = {has_features_last(projection) for projection, _ in orders if projection is not None}
    if len({x.data_ptr() for x in parts}) < 3 or len(are_last) != 1 or {are_rows for _, are_rows in orders} != are_last:
        return False
    others = [weakref.ref(x) for x, (projection, _) in zip(parts, orders, strict=True) if projection is None]
    frame = frames[-1]
    return not others or (len(others) == 1 and frame.find_contents(others[0]) == TOKEN and not skip_layouts(frame, others[0]))


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
        of_tokens, of_features = (find_stride(table, x, dims, axes) for axes in (tokens, features))
        are_rows = None if of_tokens is None or of_features is None else of_tokens > of_features
        orders.append((find_projection(frames, x), are_rows))
    return orders


def sums_features(frames: list[ModuleFrame], product: LabelledProduct, x: Tensor) -> bool:
    """Return whether a product sums its operand x over features that a layer has made, as of keys, and not over tokens."""
    projection = find_projection(frames, x)
    is_last = None if projection is None else has_features_last(projection)
    if is_last is None:
        return False
    own = [*zip(product.labels[product.find_place(x)], x.stride(), x.shape, strict=True)]
    summed = [stride for label, stride, size in own if label not in product.result and size > 1]
    kept = [stride for label, stride, size in own if label in product.list_rows(product.find_place(x)) and size > 1]
    return bool(summed and kept) and ((max(summed) < min(kept)) if is_last else (min(summed) > max(kept)))


def find_stride(table: AxisTable, x: Tensor, dims: Dims, axes: set[int]) -> int | None:
    """Return the least stride of the dimensions of x with some axes; None if it has none of them."""
    own = zip(x.stride(), table.expand_dims(dims), strict=True)
    return min((stride for stride, one in own if axes & set(one)), default=None)


def find_shared_heads(table: AxisTable, roles: ChainRoles, axes: set[int]) -> set[int]:
    """Return those of some axes of queries alone that are heads with the same keys; none if that is not known.

    Tokens have as many dimensions in queries as in keys. A layer has made the queries of all heads of a token as its features.
    """
    own = [(x, one) for x, one in zip(roles.q.stride(), map(set, table.expand_dims(roles.q_dims)), strict=True) if one & axes]
    count = len(own) - max(sum(bool(roles.keys & {*one}) for one in table.expand_dims(roles.k_dims)), 1)
    projection = find_projection(STATE.frames, roles.q) if count > 0 else None
    is_last = None if projection is None else has_features_last(projection)
    own.sort(key=lambda pair: pair[0], reverse=not is_last)
    return set() if is_last is None else axes & {axis for _, one in own[:count] for axis in one}


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

    So it is where a product has a matrix for each token of an input, ids (b, t) or (b, t, c), and no input has as many rows.
    """
    batch = [label for label in product.result if all(label in one for one in product.labels)]
    count, rows = (math.prod(map(product.get_size, one)) for one in (batch, labels))
    inputs = (x for frame in frames for x in frame.input_tensors)
    shapes = [x.shape for x in inputs if x.dim() == 3 or (x.dim() == 2 and not x.is_floating_point())]
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


def list_axes(table: AxisTable, dims: Dims) -> set[int]:
    """Return all axes of a tensor, where those that were split are their parts."""
    return {axis for axes in table.expand_dims(dims) for axis in axes}


def has_moved_axes(table: AxisTable, form: ScoreForm, dims: Dims) -> bool:
    """Return whether a tensor with these axes has one that neither operand of its form has, as where entries were moved."""
    return not list_axes(table, dims) <= list_axes(table, form.a_dims) | list_axes(table, form.b_dims)


def select_axes(table: AxisTable, dims: Dims, axes: set[int]) -> Axes:
    """Return those of some axes that a tensor has, in its order."""
    return tuple(axis for one in table.expand_dims(dims) for axis in one if axis in axes)


def find_dimension(table: AxisTable, dims: Dims, axes: Axes) -> int:
    """Return the dimension of a tensor that holds some axes, the last one if none does."""
    own = table.expand_dims(dims)
    return next((n for n, one in enumerate(own) if {*axes} <= {*one}), len(own) - 1)


def is_causal_table(table: AxisTable, step: ScoreStep, queries: Axes, keys: Axes) -> bool:
    """Return whether a step multiplies the scores of later keys by 0, or writes 0 there, and leaves all others."""
    axes = list_axes(table, step.dims)
    if axes != {*queries, *keys} or queries == keys or not isinstance(step.operand, Tensor):
        return False
    if step.kind is StepKind.FILL:
        visible = table.arrange(~step.operand, step.dims, (queries, keys))
        return not step.amount and torch.equal(visible, torch.ones_like(visible).tril())
    visible = table.arrange(step.operand, step.dims, (queries, keys))
    return step.kind is StepKind.MULTIPLY and torch.equal(visible, torch.ones_like(visible).tril())


def split_channels(table: AxisTable, dims: Dims, queries: Axes) -> tuple[Axes, Axes]:
    """Return the axes of batch and of heads where each channel is one: the batch is the first dimension beside the queries."""
    rows = [axes for axes in table.expand_dims(dims) if not set(axes) & set(queries)]
    batch = rows.pop(0) if len(rows) > 1 else ()
    return batch, tuple(axis for axes in rows for axis in axes)


def read_call(
    table: AxisTable, roles: ChainRoles, trace: Trace, product: LabelledProduct, y: Tensor, kernel: str
) -> tuple[LinearCall, Tensor]:
    """Return the call whose output is y, and the place of each entry of y in (b, h, q, e).

    Raises UnreadableError if the products of keys with values were changed otherwise than by factors and a running sum.
    """
    if product.added is not None:
        raise UnreadableError(CHANGED.format("an addition"))
    dims = roles.dims
    own, of_keys, of_values = (
        list_axes(table, one) - roles.features - roles.keys for one in (roles.q_dims, roles.k_dims, roles.v_dims)
    )
    batch = of_keys | (own & of_values)
    running = roles.keys & list_axes(table, dims)
    width = select_axes(table, dims, of_values - batch)
    features, keys = (select_axes(table, roles.k_dims, one) for one in (roles.features, roles.keys))
    is_by_channel = not (features or width)
    shared = own - batch if running else find_shared_heads(table, roles, own - batch)
    shared = set() if is_by_channel else shared
    queries = select_axes(table, dims, running or own - batch - shared)
    given = [axes for axes in (select_axes(table, (one,), batch) for one in dims) if axes]
    if is_by_channel:
        first = split_channels(table, dims, queries)
    elif (
        len(given) == 1 and sum(not batch.union(roles.features).issuperset(one) for one in table.expand_dims(roles.q_dims)) > 1
    ):
        is_behind_batch = () in dims and dims.index(()) < find_dimension(table, dims, given[0])  # of one row, without an axis
        first = ((), given[0]) if is_behind_batch else (given[0], ())
    else:
        first = split_batch(table, given, roles.v, roles.v_dims, count_tokens(table, queries, keys))
    first = first[0], (*first[1], *select_axes(table, dims, shared))
    groups = (*first, queries, width)
    outputs = table.arrange(y.detach(), dims, groups).clone()  # y may be written into, as by a residual connection
    q = table.arrange(roles.q, roles.q_dims, (*first, queries, features))
    v = table.arrange(roles.v, roles.v_dims, (*first, keys, width))
    k = table.arrange(roles.k, roles.k_dims, (*first, keys, features))
    k = k if product.factor == 1 else k * product.factor
    assert trace.form is not None
    is_summed = False
    for step in trace.form.steps:
        if step.kind is StepKind.MULTIPLY and isinstance(step.operand, Tensor):
            axes = list_axes(table, step.dims)
            if is_summed or (axes & set(queries) and not axes & set(keys)):
                q = q * table.arrange(step.operand, step.dims, (*first, queries, features))
            elif not is_causal_table(table, step, queries, keys):
                k = k * table.arrange(step.operand, step.dims, (*first, keys, features))
        elif step.kind is StepKind.MULTIPLY and isinstance(step.operand, float):
            k = k * step.operand
        elif step.kind is StepKind.CUMSUM:
            is_summed = True
        elif not is_causal_table(table, step, queries, keys):
            raise UnreadableError(CHANGED.format(step.kind.name.lower()))
    q, k, v = (x.expand(*outputs.shape[:2], -1, -1) for x in (q, k, v))
    call = LinearCall(
        kernel=kernel,
        q=q,
        k=k,
        v=v,
        is_causal=roles.is_causal,
        outputs=outputs,
        columns=torch.arange(v.shape[3], device=y.device),
        row_scale=outputs.new_ones(outputs.shape[:3], dtype=score_dtype(y.dtype)),
        eps=max(trace.eps, torch.finfo(y.dtype).eps),
    )
    places = torch.arange(outputs.numel(), device=y.device).view(outputs.shape)
    return call, table.restore(places, groups, dims, y.shape)
