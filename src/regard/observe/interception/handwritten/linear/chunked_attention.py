"""Linear attention in chunks of tokens: masked scores within each chunk, and a state that carries the sums of earlier chunks.

Within a chunk, the followed formula of the scores gives the decays between its tokens. What a state decays by from one chunk to
the next is solved for from the layer's own output: one number, or one for each feature. All tokens are then compared with that
output. Sources: Sun et al. 2023 (RetNet), Yang et al. 2023 (gated linear attention), Dao and Gu 2024 (state space duality).
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.mechanism.scores import score_dtype
from regard.observe.interception.handwritten.linear.chunk_states import Chunk, join_chunks
from regard.observe.interception.handwritten.linear.corrected_values import CORRECTED, read_delta_rule
from regard.observe.interception.handwritten.linear.linear_attention import ChainRoles
from regard.observe.interception.handwritten.linear.linear_call import group_axes
from regard.observe.interception.handwritten.linear.linear_product import LinearProduct
from regard.observe.interception.handwritten.products.score_form import ScoreForm, StepKind
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable, Dims
from regard.observe.interception.handwritten.scores.axis_groups import Groups, split_batch
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, build_read_call, sample_state

CHUNKS = "it is linear attention whose scores are of a part of its tokens, so it is not known how the others are added"
CARRIED = "it is linear attention in chunks, whose sum with what earlier chunks add is no recurrence that is known: {}"
SINGLE = (
    "it is linear attention of a single token, which is not recorded alone, and what may be added to it from a state is no "
    "recurrence of the tokens of one call"
)
MOST_SUMS = 3  # of a product within chunks with something else, one of which is that with the earlier chunks


class Sum(NamedTuple):
    """The output within chunks plus something else, (rows, 1, n, e), and what its rows had been multiplied by before."""

    outputs: Tensor
    row_scale: Tensor


@dataclass(eq=False)
class ChunkedCall:
    """Scores of chunks that are multiplied with values: q, k (rows, 1, n, d), v (rows, 1, n, e), rows of all other axes.

    own and decays (rows or 1, n) are those of Chunk. outputs, columns and row_scale are those of the product within chunks.
    """

    kernel: str
    table: AxisTable
    groups: Groups
    q: Tensor
    k: Tensor
    v: Tensor
    own: Tensor
    decays: Tensor
    outputs: Tensor
    columns: Tensor
    row_scale: Tensor
    lengths: set[int]  # of the inputs of the module
    made: tuple[Tensor, Dims, Dims]  # the values as they were multiplied, with their axes and those of the output
    sums: list[Sum] = field(default_factory=list)
    earlier: set[int] = field(default_factory=set)  # outputs of other calls that it was made of, by the ids of their references
    added: "list[weakref.ref[Tensor]]" = field(default_factory=list)  # what was added to its output
    states: list[Tensor] = field(default_factory=list)  # arguments of the module that may be the state before the first chunk
    sources: list[Tensor] | None = None  # what its values were made of, if also of those of earlier chunks, or of its keys
    is_sure: bool = True  # whether it is one of chunks, or else has to be added to a product of tokens

    @property
    def rows(self) -> Axes:
        """The axes of batch rows, heads and chunks."""
        return self.table.expand_axes((*self.groups.batch, *self.groups.heads))

    @property
    def tokens(self) -> int:
        """The number of tokens of a chunk."""
        return self.q.shape[2]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of rows, and the widths of keys and values, which the chunks of a loop have in common."""
        return len(self.q), self.q.shape[3], self.v.shape[3]

    def can_start_from(self, x: Tensor) -> bool:
        """Return whether a tensor has the last axes of a state."""
        sizes = self.q.shape[3], self.v.shape[3]
        return x.is_floating_point() and x.dim() > 2 and x.shape[-2:] in (sizes, sizes[::-1])

    def read(self) -> RecurrenceCall:
        """Return the call in terms of a recording. Raises UnreadableError if it is no recurrence."""
        return ChunkedLoop((self,)).read()

    def add_sum(self, outputs: Tensor) -> None:
        """Add the sum of the output with something else."""
        if len(self.sums) < MOST_SUMS:
            self.sums.append(Sum(outputs.clone(), self.row_scale))

    def arrange(self, x: Tensor, axis: int | None) -> Tensor:
        """Return a tensor (rows or 1, ...) as (chunks, b, h, ...), or (1, b, h, ...) if there is no axis of chunks."""
        groups = ((axis,) if axis is not None else (), *self.list_groups(axis))
        sizes, order = self.table.get_sizes(self.rows), [self.rows.index(one) for group in groups for one in group]
        x = x.expand(self.q.shape[0], *x.shape[1:]).reshape(*sizes, *x.shape[1:])
        x = x.permute(*order, *range(len(order), x.dim()))
        counts = [torch.Size(self.table.get_sizes(group)).numel() for group in groups]
        return x.reshape(*counts, *x.shape[len(order) :])

    def list_groups(self, axis: int | None) -> tuple[Axes, Axes]:
        """Return the axes of batch rows and of heads without that of chunks."""
        if axis is None:
            return self.table.expand_axes(self.groups.batch), self.table.expand_axes(self.groups.heads)
        v, v_dims, dims = self.made
        own = [tuple(one for one in axes if one in self.rows and one != axis) for axes in self.table.expand_dims(dims)]
        tokens = {self.tokens, self.tokens * self.table.sizes[axis]}
        return split_batch(self.table, [axes for axes in own if axes], v, v_dims, tokens)

    def split(self, found: Sum, axis: int | None) -> list[Chunk]:
        """Return the chunks along an axis, or the only one, with the outputs of a sum."""
        scale = found.row_scale.squeeze(1)  # (rows, n)
        ratio = scale[:, 1:] / scale[:, :-1]
        own, decays = self.own * scale, self.decays * torch.cat([torch.ones_like(scale[:, :1]), ratio], 1)
        four = (x.squeeze(1) for x in (self.q, self.k, self.v))
        parts = [self.arrange(x, axis) for x in (*four, own, decays, found.outputs.squeeze(1))]
        return [Chunk(*each) for each in zip(*parts, strict=True)]


class ChunkedLoop(NamedTuple):
    """The calls of the chunks of a loop, in order, or one call that has an axis of chunks."""

    calls: tuple[ChunkedCall, ...]

    def has_all_tokens(self) -> bool:
        """Return whether there are as many tokens as the module was given."""
        count = sum(one.tokens for one in self.calls)
        return find_input_length(count, self.calls[-1].tokens, self.calls[0].lengths) > 0

    def read(self) -> RecurrenceCall:
        """Return the recurrence of all tokens. Raises UnreadableError if it is none."""
        first, sources = self.calls[0], self.calls[-1].sources
        reason = CHUNKS if sources is None else CORRECTED
        for chunks in self.list_chunks():
            if not all(bool((one.own > 0).all() & (one.decays >= 0).all()) for one in chunks):
                continue
            length = find_length(chunks, first.lengths)
            for has_several, initial in product((False, True), (None, *list_states(chunks[0], first.states))):
                try:
                    factors = join_chunks(chunks, has_several, length, initial, must_carry=sources is None)
                    if sources is not None:
                        factors = read_delta_rule(factors, sources, initial)
                except UnreadableError as error:
                    reason = CARRIED.format(error) if initial is None else reason
                else:
                    call, state = build_read_call(first.kernel, factors), sample_state(initial)
                    return call if state is None else replace(call, initial_state=state, must_continue=True)
        raise UnreadableError(SINGLE if len(self.calls) == first.tokens == 1 and sources is None else reason)

    def list_chunks(self) -> Iterator[list[Chunk]]:
        """Generate what the chunks may be, by the sum that has the output, and by the axis of chunks if it is one call."""
        if len(self.calls) > 1:
            sums = [one.sums or [Sum(one.outputs, one.row_scale)] * MOST_SUMS for one in self.calls]  # the first may have none
            for each in zip(*sums, strict=False):
                yield [chunk for one, found in zip(self.calls, each, strict=True) for chunk in one.split(found, None)]
            return
        (call,) = self.calls
        if call.sources is not None and find_input_length(call.tokens, call.tokens, call.lengths):  # a single chunk
            for found in call.sums or [Sum(call.outputs, call.row_scale)]:
                yield call.split(found, None)
        for axis in call.rows:
            if find_input_length(call.table.sizes[axis] * call.tokens, call.tokens, call.lengths):
                for found in call.sums:
                    yield call.split(found, axis)


def start_call(table: AxisTable, roles: ChainRoles, made: LinearProduct, lengths: set[int]) -> tuple[ChunkedCall, Tensor]:
    """Return the call whose output within chunks a product is, and the place of each of its entries in (rows, 1, n, e).

    Raises UnreadableError if its scores were changed otherwise than by factors and a mask.
    """
    product, form, y = made.product, made.trace.form, made.y
    assert form is not None
    groups, features = group_axes(table, roles, form)
    rows = (*groups.batch, *groups.heads)
    own, decays = read_decays(table, form, rows, groups)
    four = (rows, (), groups.queries, groups.width)
    outputs = table.arrange(y.detach(), roles.dims, four)
    count = outputs.shape[0]
    q = table.arrange(roles.q.detach(), roles.q_dims, (rows, (), groups.queries, features)).expand(count, -1, -1, -1)
    k = table.arrange(roles.k.detach(), roles.k_dims, (rows, (), groups.keys, features)).expand(count, -1, -1, -1)
    v = table.arrange(roles.v.detach(), roles.v_dims, (rows, (), groups.keys, groups.width)).expand(count, -1, -1, -1)
    if not q.shape[2] == k.shape[2] == v.shape[2] == own.shape[-1]:
        raise UnreadableError(CHUNKS)
    call = ChunkedCall(
        kernel=made.kernel,
        table=table,
        groups=groups,
        q=q,
        k=k,
        v=v,
        own=own * product.factor,
        decays=decays,
        outputs=outputs,
        columns=torch.arange(v.shape[3], device=y.device),
        row_scale=outputs.new_ones(outputs.shape[:3], dtype=score_dtype(y.dtype)),
        lengths=lengths,
        made=(roles.v, roles.v_dims, roles.dims),
    )
    if product.added is not None:
        call.add_sum(outputs)
    places = torch.arange(outputs.numel(), device=y.device).view(outputs.shape)
    return call, table.restore(places, four, roles.dims, y.shape)


def read_decays(table: AxisTable, form: ScoreForm, rows: Axes, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return what multiplies the scores of each token with itself, and that with the token before over it, (rows or 1, n).

    The score of a token with an earlier one is the product of these between them, which is compared afterwards.
    """
    n = torch.Size(table.get_sizes(table.expand_axes(groups.queries))).numel()
    like = form.a.new_ones(1, n, dtype=torch.promote_types(form.a.dtype, torch.float32))
    own, before = like, like
    for step in form.steps:
        x = step.operand
        if step.kind is StepKind.FILL and not step.amount and isinstance(x, Tensor):
            x = ~x
        elif step.kind is not StepKind.MULTIPLY or not isinstance(x, Tensor | float):
            raise UnreadableError(CHUNKS)
        if isinstance(x, float):
            own, before = own * x, before * x
            continue
        pairs = table.arrange(x.detach(), step.dims, (rows, groups.queries, groups.keys)).expand(-1, n, n)
        own, before = own * pairs.diagonal(0, 1, 2), before * F.pad(pairs.diagonal(-1, 1, 2), (1, 0), value=1.0)
    last = torch.cat([torch.ones_like(own[:, :1]), own[:, :-1]], 1)
    decays = (before / last).expand(max(len(before), len(own)), -1).clone()
    decays[:, 0] = 1
    return own, decays


def list_states(chunk: Chunk, tensors: list[Tensor]) -> list[Tensor]:
    """Return tensors that may be a state (b, h, d, e) of a chunk, each as one."""
    (b, h, _, d), e = chunk.q.shape, chunk.v.shape[3]
    found = list[Tensor]()
    for x in tensors:
        if x.numel() == b * h * d * e:
            found += [x.reshape(b, h, d, e)] * (x.shape[-2:] == (d, e)) + [x.reshape(b, h, e, d).mT] * (x.shape[-2:] == (e, d))
    return found


def find_input_length(tokens: int, chunk: int, lengths: set[int]) -> int:
    """Return the length of an input that so many tokens are of, the last chunk of which may be padded; 0 if there is none."""
    return max((n for n in lengths if tokens - chunk < n <= tokens), default=0)


def find_length(chunks: list[Chunk], lengths: set[int]) -> int:
    """Return the number of tokens of chunks without those that pad the last one."""
    count = sum(one.q.shape[2] for one in chunks)
    return find_input_length(count, chunks[-1].q.shape[2], lengths) or count
