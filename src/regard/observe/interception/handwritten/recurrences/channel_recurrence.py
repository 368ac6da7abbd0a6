"""The recurrence of each channel of a loop or a scan over vectors: h_i = a_i h_(i - 1) + w_i v_i, and what is read of it.

Channels that share all factors are the width of one head, as where a layer has one gate for each token.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from regard.map.computed_bias import drop_repeated_axes
from regard.map.linear_recurrence import GONE, LinearRecurrence
from regard.mechanism.scores import score_dtype
from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.handwritten.ancestors.ancestor_search import find_ancestors
from regard.observe.interception.handwritten.recurrences.channel_scans import ChannelScan
from regard.observe.interception.handwritten.recurrences.channel_states import ChannelLoop
from regard.observe.interception.handwritten.recurrences.loop_check import compare_outputs
from regard.observe.interception.handwritten.recurrences.loop_recurrence import GROWS, KERNEL
from regard.observe.interception.handwritten.recurrences.state_loop import ChannelState
from regard.observe.interception.handwritten.recurrences.token_joiner import BACKWARDS, DIFFERS
from regard.observe.interception.handwritten.recurrences.token_order import (
    are_out_of_order,
    are_taken_out_of_order,
    is_increasing,
)
from regard.observe.interception.plain_tensors import UnreadableError
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors, build_read_call


class Roles(NamedTuple):
    """Which of the tensors that a token adds are the values, in what is read and in the states: by their place."""

    values: int
    of_states: int


def read_channel_loop(loop: ChannelLoop) -> tuple[RecurrenceCall, CallAdapter]:
    """Return a loop over vectors as a call; it has run already. Raises UnreadableError if it is none."""
    factors = read_loop_factors(loop)
    return build_read_call(KERNEL.format(loop.function), factors), CallAdapter(lambda: None)


def read_loop_factors(loop: ChannelLoop) -> RecurrenceFactors:
    """Return the factors of a loop over vectors. Raises UnreadableError if it is none, or differs from what it computed."""
    read = [entry.state for entry in loop.entries]
    is_direct = all(one is other.before for one, other in pairwise(read))
    states = read if is_direct else [one.before for one in read[1:] if one.before is not None] + read[-1:]
    chain = states if is_direct else states[:-1]
    if len(states) < len(read) or states[0].before is not None or read[0].before is not None:
        raise UnreadableError(DIFFERS)
    if any(one is not other.before for one, other in pairwise(chain)):
        raise UnreadableError(DIFFERS)
    if takes_later_first(loop, states):
        raise UnreadableError(BACKWARDS)
    place, other = find_values(loop.frame, read, chain)
    if is_direct and len(read[0].added) == 1 < len(read[1].added):  # the first token itself
        (x,), n = read[0].added, len(read[1].added)
        read[0] = states[0] = replace(read[0], added=tuple(x if one == place else x.new_ones(()) for one in range(n)))
    if len({(one.shape.numel(), len(one.added)) for one in (*read, *states)}) > 1:
        raise UnreadableError(DIFFERS)
    join = partial(join_tokens, shape=read[0].shape)
    values = join([one.added[place] for one in read])
    decays = join([torch.ones(()) if one.decay is None else one.decay for one in states])
    own, written = (multiply_others(chosen, place_of_values) for chosen, place_of_values in ((read, place), (states, other)))
    scale = join([torch.ones(()) if entry.factor is None else entry.factor for entry in loop.entries])
    parts = {"decay": decays, "key_scale": join(written), "q": scale}
    if not is_direct:
        before = join([torch.ones(()) if one.decay is None else one.decay for one in read])
        parts |= {"q": scale * before, "skip": scale * join(own)}
    return build_factors(parts, values, join_tokens(loop.outputs, read[0].shape), is_strict=not is_direct)


def read_channel_scan(scan: ChannelScan) -> tuple[RecurrenceCall, CallAdapter]:
    """Return a scan over vectors as a call; it has run already. Raises UnreadableError if its states are others."""
    given = scan.states, scan.decays.expand_as(scan.states), scan.written
    states, decays, written = ((x.exp() if scan.are_logs else x).movedim(scan.axis, -1) for x in given)
    parts = {"decay": drop_repeated_axes(decays), "key_scale": states.new_ones(()), "q": states.new_ones(())}
    parts = {name: x.expand(*[1] * (states.dim() - 1), states.shape[-1]) if not x.dim() else x for name, x in parts.items()}
    factors = build_factors(parts, written, states, is_strict=False)
    return build_read_call(KERNEL.format(scan.function), factors), CallAdapter(lambda: None)


def find_values(frame: ModuleFrame, read: Sequence[ChannelState], states: Sequence[ChannelState]) -> Roles:
    """Return which factors of what tokens add are the values: those of states that are read too, or that make no decay.

    Of one factor it is that one. Raises UnreadableError if what is read has other values than the states.
    """
    state = states[-1]
    if read[-1] is not state:
        pairs = product(*(enumerate(one.added) for one in (read[-2], states[len(read) - 2])))
        same = [(n, m) for (n, x), (m, y) in pairs if have_same_numbers(x, y)]
        if not same:
            raise UnreadableError(DIFFERS)
        return Roles(*same[0])
    known = {one for x in state.gates for one in find_ancestors([frame], x)}
    free = [n for n, x in enumerate(state.added) if id(weakref.ref(x)) not in known] or [*range(len(state.added))]
    place = max(free, key=lambda n: (state.added[n].numel(), n))
    return Roles(place, place)


def takes_later_first(loop: ChannelLoop, states: Sequence[ChannelState]) -> bool:
    """Return whether a loop takes or writes a later token before an earlier one, or tokens in another order."""
    series = (*zip(*(one.added for one in states), strict=False), *zip(*(one.gates for one in states[1:]), strict=False))
    if any(map(are_out_of_order, series)) or not is_increasing(loop.places):
        return True
    return are_taken_out_of_order(loop.frame, [[*map(weakref.ref, (*one.added, *one.gates))] for one in states])


def have_same_numbers(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are the same entries of one memory."""
    return x.shape == y.shape and x.stride() == y.stride() and x.data_ptr() == y.data_ptr()


def multiply_others(states: Sequence[ChannelState], place: int) -> list[Tensor]:
    """Return the product of what each token adds but for the values."""
    found = []
    for one in states:
        total = torch.ones(())
        for n, x in enumerate(one.added):
            total = total * x.detach() if n != place else total
        found.append(total)
    return found


def join_tokens(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return tensors that broadcast to a shape (b, ..., c) as (b or 1, ... or 1, c or 1, t), repeated axes once."""
    wide = (x.detach().expand(shape) if x.numel() < shape.numel() else x.detach().reshape(shape) for x in parts)
    own = [*map(drop_repeated_axes, wide)]
    most = torch.broadcast_shapes(*(x.shape for x in own))
    dtype = max((x.dtype for x in own), key=lambda one: torch.finfo(one).bits)
    return torch.stack([x.to(dtype).expand(most) for x in own], -1)


def build_factors(parts: dict[str, Tensor], values: Tensor, outputs: Tensor, is_strict: bool) -> RecurrenceFactors:
    """Return a recurrence of parts, values and outputs (b, ..., c, t), each part of which may have 1 in place of a size.

    Decays are no logarithms. Raises UnreadableError if they are less than 0 or more than 1, or if M v differs from the outputs.
    """
    dtype = score_dtype(outputs.dtype)
    is_width = all(x.shape[-2] == 1 for x in parts.values())
    t = outputs.shape[-1]

    def arrange(x: Tensor, has_width: bool) -> Tensor:
        """Return (b, ..., c, t) as (b, h, t, e), or (b, h, t)."""
        if x.dim() > 3:  # several axes of heads
            x = x.expand(-1, *outputs.shape[1:-2], x.shape[-2] if is_width else outputs.shape[-2], t)
        heads = (x.flatten(1, -3) if x.dim() > 3 else x.unsqueeze(1)) if is_width else x.flatten(1, -2).unsqueeze(2)
        x = heads.transpose(2, 3)
        return x if has_width else x.squeeze(3)

    if bool((parts["decay"] < 0).any() | (parts["decay"] > 1).any() | parts["decay"].isnan().any()):
        raise UnreadableError(GROWS)
    logs = arrange(parts["decay"].double().log().clamp(min=GONE).to(dtype), True)
    q = arrange(parts["q"], True).to(dtype)
    given = {"decay": logs, "q": q, "key_scale": arrange(parts["key_scale"], False).to(dtype)}
    if is_strict:
        given |= {"row_logs": -logs.squeeze(3), "skip": arrange(parts["skip"], False).to(dtype)}
    given = {name: x.expand(-1, -1, t, *x.shape[3:]).contiguous() for name, x in given.items()}
    v, found = (arrange(x, True).contiguous() for x in (values.expand_as(outputs), outputs))
    b, h = v.shape[:2]
    given["key_scale"] = given["key_scale"].expand(b, h, -1)
    whole = {**given, "k": q.new_ones(1, 1, 1, 1)}
    compare_outputs(LinearRecurrence(**whole, is_strict=is_strict), v, found, None)
    given = {name: x for name, x in given.items() if name not in ("q", "key_scale") or bool((x != 1).any())}
    mechanism = LinearRecurrence(**given, is_strict=is_strict)
    if mechanism.shape != (b, h, t):
        mechanism = LinearRecurrence(**given | {"key_scale": whole["key_scale"].contiguous()}, is_strict=is_strict)
    return RecurrenceFactors(mechanism, v, found, None)
