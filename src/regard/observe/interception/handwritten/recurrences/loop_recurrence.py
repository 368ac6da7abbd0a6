"""The recurrence of a loop that a model writes out: its decays, queries, keys and values, joined over the tokens.

Which factor of a write is what follows from the axes of the state: those that a query sums are features, those that neither
decays, keys nor queries have are the width of the values, and the rest are batch rows, the first of three or more, and heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.map.linear_recurrence import GONE, LinearRecurrence
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.folded_heads import find_folded_rows
from regard.observe.interception.handwritten.ancestors.query_axes import list_axes
from regard.observe.interception.handwritten.products.head_guesses import count_tokens, split_heads
from regard.observe.interception.handwritten.products.tensor_axes import Axes, AxisTable
from regard.observe.interception.handwritten.recurrences.learned_starts import READ_FIRST, leave_out_weights
from regard.observe.interception.handwritten.recurrences.loop_check import compare_outputs
from regard.observe.interception.handwritten.recurrences.own_terms import (
    SCALED,
    WRITES_READ,
    adds_to_scaled,
    are_made_of_states,
    read_own_values,
)
from regard.observe.interception.handwritten.recurrences.state_loop import START, Factor, Read, StateLoop, Write
from regard.observe.interception.handwritten.recurrences.token_joiner import BACKWARDS, DIFFERS, TokenJoiner, identify_factor
from regard.observe.interception.handwritten.recurrences.token_order import are_taken_out_of_order
from regard.observe.interception.handwritten.scores.axis_groups import split_folded_heads
from regard.observe.interception.head_counts import find_head_counts
from regard.observe.interception.lookups import read_version
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, sample_state
from regard.observe.interception.thread_state import STATE

KERNEL = "by hand: recurrence, {}"
TIMES = "its {} states are to be read once each, but {} reads of them are followed"
CHUNKS = "several queries read each of its states, as in chunks of tokens"
GROWS = "its states are multiplied by more than 1 or by less than 0"
NOT_JOINED = "the rows of its loop are not joined to one tensor as they were read from its states, and stay unchanged"
IN_PARTS = "the rows of its loop are joined in parts, of which only the first was changed"
NO_VALUES = "what it writes is no product of keys with values"
NO_RULE = "what it subtracts from its values is not read by its keys from the decayed state, as by a delta rule"
EARLY_RULE = "it is a delta rule whose queries read the states before their tokens are written, which is not followed"


class LoopTokens(NamedTuple):
    """The writes and reads of a loop, token by token, or one read of all tokens, along the axis `time`.

    Strict reads are of the state before; with own_writes, what a token itself adds to that for its read alone.
    """

    writes: list[Write]
    reads: list[Read]
    is_strict: bool = False
    own_writes: Sequence[Write] = ()


class Roles(NamedTuple):
    """The groups of axes of a loop, and its factors by what they are."""

    batch: Axes
    heads: Axes
    time: Axes
    features: Axes
    width: Axes
    query: Factor
    keys: list[Factor]
    values: list[Factor]
    scales: list[Factor]


def read_loop(loop: StateLoop, table: AxisTable) -> tuple[RecurrenceCall, CallAdapter]:
    """Return a loop, which has run, as a call; its factors are read when they are asked for."""
    last = None if loop.last is None else loop.last()
    initial, left = (None if x is None else sample_state(x) for x in (loop.initial, last))
    call = RecurrenceCall(
        name_kernel(loop),
        initial,
        partial(read_factors, loop, table, left),
        must_continue=not loop.starts_from_weights,
        is_reported=loop.is_reported,
    )
    is_changeable = loop.changeable_reads == len(loop.reads)
    return replace(call, unchangeable="" if is_changeable else loop.unchangeable or NOT_JOINED), CallAdapter(lambda: None)


def can_read_loop(loop: StateLoop, table: AxisTable) -> bool:
    """Return whether the factors of a loop are known and are those of what it computed."""
    try:
        with disable_modes():
            read_factors(loop, table, None)
    except Exception:
        return False
    loop.is_recorded = False
    return True


def name_kernel(loop: StateLoop) -> str:
    """Return the name of a loop in messages: by the function that reads its states."""
    return KERNEL.format(next((read.function for read in loop.list_outputs()), "loop"))


def read_factors(loop: StateLoop, table: AxisTable, left: Tensor | None) -> RecurrenceFactors:
    """Return the factors of a loop. Raises UnreadableError if they are not known or differ from what it computed."""
    tokens, joiner, roles = read_layout(loop, table)
    output = joiner.join([one.output for one in tokens.reads])
    rows = roles.batch, roles.heads, roles.time
    b, h, t = map(joiner.count, (roles.batch, roles.heads, roles.time))
    outputs = table.arrange(output.tensor, output.dims, (*rows, roles.width)).expand(b, h, t, -1)
    values = joiner.multiply(roles.values, (*rows, roles.width)).expand(b, h, t, outputs.shape[3]).contiguous()
    skip, skip_size = None, None
    if tokens.own_writes:
        own = read_own_products(joiner, roles, tokens.own_writes)
        skip, skip_size = own.sum(3), own.abs().sum(3)
    elif tokens.is_strict and (sums := list_sums(loop, tokens)):
        total = table.arrange(joiner.join(sums).tensor, output.dims, (*rows, roles.width)).expand_as(outputs)
        skip, skip_size, outputs = read_own_values(outputs, total, values)
    mechanism = build_mechanism(loop, joiner, roles, tokens, (b, h, t), skip)
    initial = None
    if loop.initial is not None:
        initial = table.arrange(loop.initial, loop.dims, (roles.batch, roles.heads, roles.features, roles.width))
    with torch.no_grad():
        compare_outputs(mechanism, values, outputs, initial, skip_size)
    loop.is_recorded = True
    return leave_out_weights(loop, RecurrenceFactors(mechanism, values, outputs, left), initial)


def read_layout(loop: StateLoop, table: AxisTable) -> tuple[LoopTokens, TokenJoiner, Roles]:
    """Return the tokens of a loop in order, and what its axes and factors are. Raises UnreadableError if that is not known."""
    if loop.reason:
        raise UnreadableError(loop.reason)
    tokens, joiner = order_tokens(loop), TokenJoiner(table)
    count = len(tokens.writes)
    check_tokens(loop, tokens)
    joiner.times[count] = tokens.reads[0].time or joiner.add_time(count)
    return tokens, joiner, find_roles(loop, joiner, tokens)


def order_tokens(loop: StateLoop) -> LoopTokens:
    """Return the writes and reads of a loop in the order of its tokens. Raises UnreadableError if each has not one of both."""
    path, reads = find_path(loop), loop.list_outputs()
    writes, places = [loop.writes[place] for place in path], [place for read in reads for place in read.places]
    if any(read.decays for read in reads):
        raise UnreadableError(DIFFERS)
    if len(reads) == 1 and places == path:
        return LoopTokens(writes, reads)
    befores, by_place = [START, *path[:-1]], {read.places[0]: read for read in reads}
    if len(reads) == len(places) == len(path) == len(by_place):
        if by_place.keys() == set(path):
            return LoopTokens(writes, [by_place[place] for place in path])
        if by_place.keys() == set(befores):
            return LoopTokens(writes, [by_place[place] for place in befores], is_strict=True)
        branches = {loop.writes[place].before: place for place in places if place != START}
        if branches.keys() == set(befores) and not any(loop.writes[place].decays for place in places):
            own = [branches[place] for place in befores]
            return LoopTokens(writes, [by_place[place] for place in own], True, [loop.writes[place] for place in own])
    raise UnreadableError(READ_FIRST if loop.starts_from_weights else TIMES.format(len(path), len(places)))


def check_tokens(loop: StateLoop, tokens: LoopTokens) -> None:
    """Raise UnreadableError if a loop takes later tokens first, writes what it has read, or adds terms to scaled reads.

    Or if it corrects its values by what its keys read of parameters that it started from.
    """
    if loop.starts_from_weights and any(write.correction is not None for write in tokens.writes):
        raise UnreadableError(READ_FIRST)
    decays = [[one for decay in write.decays for one in decay.sources] for write in tokens.writes]
    written = [(*write.sources, *more) for write, more in zip(tokens.writes, decays, strict=True)]
    read = [one.sources for one in tokens.reads]
    if loop.frames and any(are_taken_out_of_order(loop.frames[-1], one) for one in (written, read) if len(one) > 1):
        raise UnreadableError(BACKWARDS)
    if loop.frames and are_made_of_states(loop.frames[-1], loop, (one for sources in written for one in sources)):
        raise UnreadableError(WRITES_READ)
    if loop.frames and tokens.is_strict and not tokens.own_writes and adds_to_scaled(loop.frames[-1], tokens.reads[-1]):
        raise UnreadableError(SCALED)


def find_path(loop: StateLoop) -> list[int]:
    """Return the places of the writes of a loop in the order of its tokens: the longest series of states.

    Of several that are as long, it is one whose last state was not read, or else the last.
    """
    most, read = max(loop.depths), {place for one in loop.list_outputs() for place in one.places}
    path = [max((n for n, depth in enumerate(loop.depths) if depth == most), key=lambda n: (n not in read, n))]
    while loop.writes[path[-1]].before != START:
        path.append(loop.writes[path[-1]].before)
    return path[::-1]


def find_roles(loop: StateLoop, joiner: TokenJoiner, tokens: LoopTokens) -> Roles:
    """Return what the axes and the factors of a loop are."""
    table, time = joiner.table, joiner.times[len(tokens.writes)]

    def has_any(factor: Factor, axes: tuple[int, ...]) -> bool:
        return not list_axes(table, factor.dims).isdisjoint(axes)

    own = [axis for axes in table.expand_dims(loop.dims) for axis in axes]
    if any(list_axes(table, one.query.dims) - {*own, *table.expand_axes(time)} for one in tokens.reads):
        raise UnreadableError(CHUNKS)
    query = joiner.join([one.query for one in tokens.reads])
    of_output = list_axes(table, tokens.reads[0].output.dims)
    features = tuple(axis for axis in own if axis not in of_output)
    factors, last = joiner.join_all([write.factors for write in tokens.writes]), tokens.writes[-1]
    keys = [one for one in factors if has_any(one, features)]
    others = [n for n, one in enumerate(factors) if not has_any(one, features)]
    mixed = [query, *keys, *(decay.factor for decay in last.decays)]
    batch_rows = list_axes(table, loop.dims[:1]) if len(loop.dims) > 2 else set()
    inner = [axis for axis in own if axis not in features and axis not in batch_rows]
    width = tuple(axis for axis in inner if not any(has_any(one, (axis,)) for one in mixed))
    if width:
        of_values = [n for n in others if has_any(factors[n], width)]
    else:  # each channel has decays or keys of its own, and the time steps are factors of the logs of decays too
        steps = {identify_factor(one) for decay in last.decays for one in decay.exponents}
        of_values = ([n for n in others if identify_factor(last.factors[n]) not in steps] or others)[-1:]
    if not keys or not of_values:
        raise UnreadableError(NO_VALUES)
    batch, heads = split_rows(table, loop, {*features, *width}, time)
    values, scales = ([factors[n] for n in others if (n in of_values) == is_value] for is_value in (True, False))
    return Roles(batch, heads, time, features, width, query, keys, values, scales)


def split_rows(table: AxisTable, loop: StateLoop, inner: set[int], time: Axes) -> tuple[Axes, Axes]:
    """Return the axes of batch rows and of heads of the states of a loop, which are before their inner axes.

    The batch is their first dimension, unless the functions that made its factors show that the heads are.
    """
    dims = table.expand_dims(loop.dims)
    rows = [tuple(axis for axis in axes if axis not in inner) for axes in dims if not axes or set(axes) - inner]
    is_known = loop.last is not None and len(rows) in (1, 2) and rows == [*dims[: len(rows)]]
    folded = find_folded_rows(STATE.frames, loop.last, loop.shape, len(rows)) if is_known and loop.last is not None else None
    if folded is not None:
        return split_folded_heads(table, rows, folded)
    if len(rows) > 1:
        return rows[0], tuple(axis for axes in rows[1:] for axis in axes)
    tokens = count_tokens(table, table.expand_axes(time))
    return split_heads(table, [axes for axes in rows if axes], tokens, find_head_counts())


def build_mechanism(
    loop: StateLoop, joiner: TokenJoiner, roles: Roles, tokens: LoopTokens, shape: tuple[int, int, int], skip: Tensor | None
) -> LinearRecurrence:
    """Return the recurrence of a loop, of a shape (b, h, t), with what multiplies the value of each token for itself."""
    rows, dtype = (roles.batch, roles.heads, roles.time), score_dtype(roles.query.tensor.dtype)
    d = joiner.count(roles.features)
    q, k = (joiner.multiply(one, (*rows, roles.features)).expand(-1, -1, -1, d) for one in ([roles.query], roles.keys))
    parts = {"q": q, "k": k}
    if roles.scales:
        parts["key_scale"] = joiner.multiply(roles.scales, (*rows, ())).squeeze(3)
    decay, rates = read_decays(loop, joiner, roles, tokens.writes)
    parts |= {"decay": decay.to(dtype)} | ({} if rates is None else {"rates": rates.to(dtype)})
    if any(write.correction is not None for write in tokens.writes):
        parts["k"], ratio = read_delta_rule(loop, joiner, roles, tokens.writes, k)
        parts["beta"] = (ratio * parts.pop("key_scale", 1.0)).to(dtype)
    if tokens.is_strict and "beta" in parts:
        raise UnreadableError(EARLY_RULE)
    if tokens.is_strict:
        logs = parts["decay"] if rates is None else decay * rates
        parts["row_logs"] = -logs.to(dtype) if logs.shape[3] > 1 else -logs.squeeze(3).to(dtype)
    if skip is not None:
        parts["skip"] = skip.to(dtype)
    b, h, t = (max(x.shape[axis] for x in parts.values()) for axis in range(3))
    if (b, h, t) != shape:  # all factors are the same for every token
        name = "beta" if "beta" in parts else "key_scale"
        parts[name] = parts.get(name, q.new_ones(1, 1, 1)).expand(shape).contiguous()
    return LinearRecurrence(**parts, is_strict=tokens.is_strict)


def list_sums(loop: StateLoop, tokens: LoopTokens) -> list[Factor]:
    """Return what the reads of all tokens were added to something else to, with their axes; none if some were not."""
    places = [next(n for n, read in enumerate(loop.reads) if read is one) for one in tokens.reads]
    found = [(loop.sums.get(place), loop.reads[place].output) for place in places]
    sums = [Factor(x, read.dims, read_version(x)) for x, read in found if x is not None and x.shape == read.tensor.shape]
    return sums if len(sums) == len(places) else []


def read_own_products(joiner: TokenJoiner, roles: Roles, writes: Sequence[Write]) -> Tensor:
    """Return the products (b, h, t, d) of queries with what each token writes for itself, whose sum multiplies its value."""
    factors = joiner.join_all([write.factors for write in writes])
    groups = roles.batch, roles.heads, roles.time, roles.features
    own = [one for one in factors if not any(one is value for value in roles.values)]
    return joiner.multiply([roles.query], groups) * joiner.multiply(own, groups)


def read_decays(loop: StateLoop, joiner: TokenJoiner, roles: Roles, writes: list[Write]) -> tuple[Tensor, Tensor | None]:
    """Return the log decays (b, h, t, 1 or d) and the rates that these are to be multiplied by, if there are any.

    Nothing is left of zeros, whatever the first decay is: it may be missing.
    """
    table, zero = joiner.table, roles.query.tensor.new_zeros(1, 1, 1, 1)
    starts_decayed = loop.initial is None or loop.starts_from_weights
    is_missing = len(writes) > 1 and starts_decayed and len(writes[0].decays) != len(writes[1].decays)
    columns = [*zip(*(write.decays for write in writes[int(is_missing) :]), strict=False)]
    if not columns:
        return zero, None
    time = joiner.add_time(len(columns[0]))
    groups, total, rates = (roles.batch, roles.heads, time, roles.features), zero, None
    for column in columns:
        counts = {len(decay.exponents) for decay in column}
        if counts == {0} or len(counts) > 1:
            factor = joiner.join([decay.factor for decay in column])
            values = table.arrange(factor.tensor, factor.dims, groups).double()
            logs = values.where(values != 0, 1).log().masked_fill(values == 0, GONE)  # whose gradient is not NaN
            total = total + logs.masked_fill(values < 0, torch.nan).clamp(min=GONE)
            continue
        exponents = joiner.join_all([decay.exponents for decay in column])
        constant = [one for one in exponents if is_rate(table, one, roles, time)]
        others = [one for one in exponents if not any(one is rate for rate in constant)]
        if len(columns) == 1 and constant and others and (loop.left is None or loop.left.has_rates):
            rates = joiner.multiply(constant, (roles.batch, roles.heads, (), roles.features))
            total = joiner.multiply(others, groups)
        else:
            total = total + joiner.multiply(exponents, groups)
    loop.has_rates = rates is not None
    most = total if rates is None else torch.cat([total.amax((0, 2), True) * rates, total.amin((0, 2), True) * rates])
    if bool((most > 0).any() | most.isnan().any()):
        raise UnreadableError(GROWS)
    if is_missing and loop.starts_from_weights:  # of weights, all is left after the first token
        return F.pad(total.expand(-1, -1, len(writes) - 1, -1), (0, 0, 1, 0)), rates
    return F.pad(total, (0, 0, 1, 0)) if is_missing and total.shape[2] > 1 else total, rates


def is_rate(table: AxisTable, factor: Factor, roles: Roles, time: Axes) -> bool:
    """Return whether a factor of log decays has a number for each feature, the same for all tokens and batch rows."""
    axes = list_axes(table, factor.dims)
    return bool(axes & set(roles.features)) and not axes & {*table.expand_axes(time), *roles.batch}


def read_delta_rule(
    loop: StateLoop, joiner: TokenJoiner, roles: Roles, writes: list[Write], written: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys (b, h, t, d) of a delta rule, and what the written keys are of these, (b, h, t)."""
    reads = [loop.reads[write.correction] for write in writes if write.correction is not None]
    if len(reads) < len(writes):
        raise UnreadableError(DIFFERS)
    for read, write in zip(reads, writes, strict=True):
        ours, theirs = ([identify_factor(one.factor) for one in part.decays] for part in (read, write))
        if read.places != (write.before,) or ours != theirs:
            raise UnreadableError(NO_RULE)
    key = joiner.join([read.query for read in reads])
    k = joiner.table.arrange(key.tensor, key.dims, (roles.batch, roles.heads, roles.time, roles.features))
    k, written = torch.broadcast_tensors(k, written)
    if torch.equal(k, written):
        return k, k.new_ones(1, 1, 1)
    return k, (k.double() * written.double()).sum(3) / k.double().square().sum(3).clamp(min=torch.finfo(torch.float32).tiny)
