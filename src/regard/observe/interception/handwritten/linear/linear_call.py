"""A call of linear attention: its queries, keys and values by batch and heads, held against the layer's own output."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import IDENTITY, ScoredMatrix
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import CallAdapter, adapt_entries, build_plain_call
from regard.observe.interception.handwritten.ancestors.query_axes import find_row_axes, list_axes
from regard.observe.interception.handwritten.linear.linear_attention import TITLE, ChainRoles, select_axes
from regard.observe.interception.handwritten.linear.linear_product import LinearProduct
from regard.observe.interception.handwritten.products.head_guesses import count_tokens
from regard.observe.interception.handwritten.products.score_form import ScoreForm, ScoreStep, StepKind
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.scores.axis_groups import Groups, split_batch
from regard.observe.interception.handwritten.scores.row_comparison import OUTPUT_ROUNDINGS, SAMPLED_ROWS
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, sample_state
from regard.observe.interception.thread_state import STATE

CHANGED = "it is linear attention, whose products of keys with values are changed by {} before queries are multiplied with them"


class RowSums(NamedTuple):
    """The sums (b, h, q) of the weights of rows that a layer has divided by them, plus one number or none.

    scale (b, h, q) is what the products of queries and keys were multiplied by in all. With a bound, it is not known what the
    layer divides by where sums are smaller than all that it had.
    """

    scale: Tensor
    sums: Tensor
    is_bounded: bool

    def compute_left(self, cut: Tensor) -> Tensor | None:
        """Return by what a sum is smaller without some weights, as a factor; None if that is not known."""
        if self.is_bounded and bool((self.sums - cut < self.sums.amin()).any()):
            return None
        return 1 - cut * self.scale.to(cut.dtype)


@dataclass(eq=False)
class LinearCall:
    """A call of linear attention: q, k (b, h, n, d), v (b, h, n, e), and the output as far as it was followed.

    columns are those of the values that the output has; row_scale is (b, h, q). divisor are the sums of the weights of rows,
    once a layer has divided by them. keeps_divisor says that it divided by what may depend on the weights, which a cut leaves
    as it was; keeps_scale, that it multiplied the rows in a way that changed outputs are not followed through.
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
    divisor: RowSums | None = None
    keeps_divisor: bool = False
    keeps_scale: bool = False
    note: str = ""

    def adapt(self, y: Tensor, places: Tensor) -> CallAdapter:
        """Return how the output y, whose entries have these places in (b, h, q, e), converts to a context and back.

        Columns of ones among the values give the sums of the weights: they stay as they are, and are no part of the context.
        """
        v, own = self.v[..., self.columns], self.find_values()
        placed = places.flatten().argsort().argsort().view(places.shape)  # among the entries of y
        adapter = adapt_entries(y, placed, self.outputs.shape)
        read_context, write_context = adapter.context, adapter.result
        assert read_context is not None
        assert write_context is not None
        if len(own) < v.shape[3]:
            adapter.context = lambda out: read_context(out)[..., own]
            adapter.result = lambda new, out: write_context(read_context(out).index_copy(3, own, new), out)
        adapter.cut_entries = self.cut_entries
        adapter.plain_call = build_plain_call(self.outputs, v[..., own], kernel=self.kernel, can_use_cache=self.is_causal)
        return adapter

    def find_values(self) -> Tensor:
        """Return which of the columns of the output are no sums of the weights."""
        are_sums = (self.v[..., self.columns] == 1).all(2).all(0).all(0)
        return (~are_sums if bool(are_sums.any() & ~are_sums.all()) else torch.ones_like(are_sums)).nonzero().flatten()

    def cut_entries(self, context: Tensor, hidden: Tensor) -> Tensor:
        """Return a context (b, h, q, e) less the hidden entries (b, h, q, k) of the matrix, times their values.

        Rows that were divided by the sums of their weights are divided by those of the weights that are left.
        """
        n, t = hidden.shape[2:]
        hidden = hidden.tril(t - n) if self.is_causal else hidden
        weights = (self.q @ self.k.mT).masked_fill(~hidden, 0)
        part = (weights @ self.v[..., self.columns][..., self.find_values()]) * self.row_scale.unsqueeze(-1).to(context.dtype)
        new = context - part.to(context.dtype)
        if self.divisor is not None:
            sums, seen = weights.sum(-1), torch.ones(n, t, dtype=torch.bool, device=hidden.device)
            is_blind = (hidden | ~seen.tril(t - n) if self.is_causal else hidden).all(-1)
            left = self.divisor.compute_left(sums.masked_fill(is_blind, 0))
            self.keeps_divisor |= left is None
            new = new if left is None else (new / left.unsqueeze(-1).to(new.dtype)).masked_fill(is_blind.unsqueeze(-1), 0)
        return torch.where(hidden.any(-1, keepdim=True), new, context)

    def divide_rows(self, factor: Tensor, is_quotient: bool, is_bounded: bool) -> None:
        """Note what a layer has multiplied the rows by, (b, h, q), perhaps one over something that may have a bound."""
        n, t = self.q.shape[2], self.k.shape[2]
        if self.is_causal:
            earlier = self.k.detach().double().cumsum(2)[:, :, t - n :]
        else:
            earlier = self.k.detach().double().sum(2, keepdim=True)
        sums = (self.q.detach().double() * earlier).sum(-1)
        scale, by = self.row_scale.detach().double(), factor.detach().double()
        added = 1 / by - sums * scale
        rounding = OUTPUT_ROUNDINGS * self.eps * self.k.shape[3] * (added.abs() + (sums * scale).abs()).amax()
        if bool(((added - added.flatten()[0]).abs() <= rounding).all()):
            self.divisor = RowSums(self.row_scale * factor, sums, is_bounded)
        elif is_quotient and not bool((by == by.flatten()[0]).all()):
            self.keeps_divisor = True

    def read(self) -> RecurrenceCall:
        """Return the call in terms of a recording. Raises UnreadableError if its formula differs from the layer's output."""
        values = self.v.detach()[..., self.columns].contiguous()
        q, k, n, t = self.q.detach(), self.k.detach(), self.q.shape[2], self.k.shape[2]
        self.compare_output(values)
        row_scale = None if bool((self.row_scale == 1).all()) else self.row_scale.detach().to(score_dtype(q.dtype))
        mechanism: LinearRecurrence | ScoredMatrix
        if self.is_causal:
            mechanism = LinearRecurrence(decay=k.new_zeros(1, 1, 1, 1), q=q, k=k, gate=row_scale)
        else:
            mechanism = ScoredMatrix(q=q, k=k, activation=IDENTITY, row_scale=row_scale, title=TITLE)
        factors = RecurrenceFactors(mechanism, values, self.outputs, sample_state(values), note=self.note)
        initial = sample_state(values[:, :, : t - n]) if 0 < n < t else None
        call = RecurrenceCall(self.kernel, initial, lambda: factors, must_continue=False)
        return replace(call, keeps_divisor=self.keeps_divisor, keeps_scale=self.keeps_scale)

    def compare_output(self, values: Tensor) -> None:
        """Compare sampled rows of the matrix times values with the layer's output. Raises UnreadableError if they differ."""
        n, t = self.q.shape[2], self.k.shape[2]
        rows = torch.linspace(0, n - 1, min(n, SAMPLED_ROWS), device=self.q.device).long()
        seen = torch.arange(t, device=rows.device) <= rows.unsqueeze(-1) if self.is_causal else rows.new_ones(1).bool()
        q, k, v = self.q.detach()[:, :, rows].double(), self.k.detach().double(), values.double()
        scale = self.row_scale.detach()[:, :, rows].double().unsqueeze(-1)
        found = (q @ k.mT).masked_fill_(~seen, 0) @ v * scale
        size = (q.abs() @ k.abs().mT).masked_fill_(~seen, 0) @ v.abs() * scale.abs()
        difference = (found - self.outputs[:, :, rows].double()).abs()
        if bool((difference > OUTPUT_ROUNDINGS * self.eps * size).any()):  # not where the layer's own output is NaN
            raise UnreadableError(f"its formula differs from its output by {float(difference.nan_to_num(0).amax()):.2g}")


def find_shared_heads(table: AxisTable, roles: ChainRoles, axes: set[int], form: ScoreForm | None) -> set[int]:
    """Return those of some axes of queries alone that are heads with the same keys; none if that is not known.

    A layer has made the queries of all heads of a token as its features, or keys have an axis of heads of size 1.
    """
    found = find_row_axes(STATE.frames, table, roles.q, roles.q_dims)
    if found is not None and found.rows & axes:
        return {*table.expand_axes((*axes,))} - found.rows
    if form is not None and form.a.dim() == form.b.dim() == len(form.dims):
        matrices = zip(*(table.expand_dims(dims[:-2]) for dims in (form.a_dims, form.b_dims, form.dims)), strict=True)
        return axes & {axis for a, b, axes_of_scores in matrices if not (a and b) for axis in axes_of_scores}
    return set()


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


def find_joined_heads(table: AxisTable, form: ScoreForm, features: Axes, width: Axes) -> tuple[ScoreStep, int] | None:
    """Return the step that keeps products of features with values of the same head alone, and the number of heads; or None.

    Heads that are joined in one product have a table with blocks of ones on its diagonal.
    """
    for step in form.steps if len(features) == len(width) == 1 else ():
        x = step.operand
        if not isinstance(x, Tensor) or list_axes(table, step.dims) != {*features, *width} or x.is_complex():
            continue
        if step.kind is StepKind.FILL and not step.amount:
            x = ~x
        elif step.kind is not StepKind.MULTIPLY:
            continue
        kept = table.arrange(x.detach(), step.dims, (features, width))
        count = kept.shape[1] // max(1, int((kept[0] != 0).sum()))
        if count > 1 and not (kept.shape[0] % count or kept.shape[1] % count):
            block = torch.ones(kept.shape[0] // count, kept.shape[1] // count, device=kept.device)
            if torch.equal(kept.to(block.dtype), torch.block_diag(*[block] * count)):
                return step, count
    return None


def group_axes(table: AxisTable, roles: ChainRoles, form: ScoreForm | None) -> tuple[Groups, Axes]:
    """Return the groups of axes of a call, and the features of queries and keys. Heads that share keys are the last ones.

    form is that of the first product.
    """
    dims = roles.dims
    own, of_keys, of_values = (
        list_axes(table, one) - roles.features - roles.keys for one in (roles.q_dims, roles.k_dims, roles.v_dims)
    )
    batch, running = of_keys | (own & of_values), roles.keys & list_axes(table, dims)
    width = select_axes(table, dims, of_values - batch)
    features, keys = (select_axes(table, roles.k_dims, one) for one in (roles.features, roles.keys))
    is_by_channel, shared = not (features or width), set[int]()
    if not is_by_channel:
        shared = own - batch if running else find_shared_heads(table, roles, own - batch, form)
    queries = select_axes(table, dims, running or own - batch - shared)
    rows = [(n, axes) for n, one in enumerate(dims) if (axes := select_axes(table, (one,), batch))]
    axes_of_queries = [one for one in table.expand_dims(roles.q_dims) if not batch | roles.features >= {*one}]
    if is_by_channel:
        before, heads = split_channels(table, dims, queries)
    elif len(rows) == 1 and len(axes_of_queries) > 1:
        ((n, axes),) = rows
        before, heads = ((), axes) if () in dims[:n] else (axes, ())  # a batch of one row has no axis
    else:
        tokens = count_tokens(table, queries, keys)
        before, heads = split_batch(table, [axes for _, axes in rows], roles.v, roles.v_dims, tokens)
    return Groups(before, (*heads, *select_axes(table, dims, shared)), queries, keys, width), features


def read_call(table: AxisTable, roles: ChainRoles, made: LinearProduct) -> tuple[LinearCall, Tensor]:
    """Return the call whose output a product is, and the place of each of its entries in (b, h, q, e).

    Raises UnreadableError if the products of keys with values were changed otherwise than by factors and a running sum.
    """
    product, trace, y = made.product, made.trace, made.y
    if product.added is not None:
        raise UnreadableError(CHANGED.format("an addition"))
    groups, features = group_axes(table, roles, trace.form)
    assert trace.form is not None
    queries, keys, width, steps = groups.queries, groups.keys, groups.width, trace.form.steps
    heads_of_keys, heads = groups.heads, groups.heads
    joined = find_joined_heads(table, trace.form, features, width)
    if joined is not None:  # heads of queries and keys are other axes than those of values
        steps = tuple(step for step in steps if step is not joined[0])
        (head, feature), (own_head, column) = (table.split_axis(axes[0], joined[1]) for axes in (features, width))
        features, width = (feature,), (column,)
        heads_of_keys, heads = (*heads_of_keys, head), (*heads, own_head)
    first, four = (groups.batch, heads_of_keys), (groups.batch, heads, queries, width)
    outputs = table.arrange(y.detach(), roles.dims, four).clone()  # y may be written into, as by a residual connection
    q = table.arrange(roles.q, roles.q_dims, (*first, queries, features))
    v = table.arrange(roles.v, roles.v_dims, (*four[:2], keys, width))
    k = table.arrange(roles.k, roles.k_dims, (*first, keys, features))
    k = k if product.factor == 1 else k * product.factor
    is_summed = False
    for step in steps:
        if step.kind is StepKind.MULTIPLY and isinstance(step.operand, Tensor):
            axes = list_axes(table, step.dims)
            if axes & {*features} and axes & {*width}:
                raise UnreadableError(CHANGED.format("a table of features and values"))
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
        kernel=made.kernel,
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
    return call, table.restore(places, four, roles.dims, y.shape)
