"""States that are vectors of channels, in loops over tokens: each is the last one times a factor, plus what a token adds.

A tensor is followed as a state times a factor. A sum of that with something else is a state of its own, so that what a loop
reads, as RWKV's average with a bonus for the token itself, may be another state than the one that it goes on with.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef, has_tokens
from regard.observe.interception.handwritten.products.score_form import COPIES, PRODUCTS, QUOTIENTS, VIEWS
from regard.observe.interception.handwritten.products.traces import share_memory
from regard.observe.interception.handwritten.recurrences.followed_function import FollowedFunction, Mixture
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
from regard.observe.interception.handwritten.recurrences.state_loop import (
    MIN_TOKENS,
    Channels,
    ChannelState,
    Factors,
    State,
    is_zeros,
)
from regard.observe.interception.handwritten.recurrences.state_writes import find_term_traces
from regard.observe.interception.handwritten.recurrences.token_order import TokenPicks, find_indices
from regard.observe.interception.provenance import LEARNED, WEIGHT, ModuleFrame


@dataclass(eq=False)
class ChannelLoop:
    """What a loop over tokens joined of its states, in order, and the tensors that it joined, (b, ...) each."""

    frame: ModuleFrame
    function: str
    entries: list[Channels] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # in memory, of the entries that it wrote the outputs to


class JoinedChannels(NamedTuple):
    """A loop over vectors whose states one tensor joins, and the places there of its entries, (b, ..., c, t)."""

    loop: ChannelLoop
    places: Tensor


class ChannelStates:
    """The states of the loops of one forward that are vectors, and what was read of them."""

    def __init__(self, log: StateLog) -> None:
        self.log = log
        self.loops: list[ChannelLoop] = []
        self.modules = weakref.WeakSet[nn.Module]()  # of which a loop or a scan over vectors was recorded
        self.buffers = WeakTensorKeyDictionary()  # the loop that writes what it reads to a tensor

    def clear(self) -> None:
        """Forget all loops."""
        self.loops.clear()
        self.buffers.clear()

    def follow_start(self, call: FollowedFunction) -> bool:
        """Follow the sum of zeros and tokens as the first state of a loop; return whether it is a state plus no product."""
        if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
            return False
        if call.core != "add":
            return self.follow_difference(call)
        (one, other), y = find_term_traces(*map(call.find, call.args)), call.y
        if isinstance(one, State) and (other is None or isinstance(other, Factors)):
            state, added = one, call.args[1]
        elif isinstance(other, State) and (one is None or isinstance(one, Factors)):
            state, added = other, call.args[0]
        else:
            return False
        if (
            is_zeros(state)
            and isinstance(added, Tensor)
            and y.dim() > 1
            and added.shape == y.shape
            and has_tokens(call.frame, added)
        ):
            self.log.put(y, Channels(ChannelState(None, None, self.split_product(added), y.shape)))
        return True

    def follow_difference(self, call: FollowedFunction) -> bool:
        """Follow a value without a state of zeros as that value, as in h + z (x - h); return whether it is one."""
        (x, other), y = call.args[::-1] if call.is_reversed else call.args, call.y
        trace = call.find(x) if isinstance(x, Tensor) else None
        is_value = isinstance(x, Tensor) and x.shape == y.shape and (trace is None or isinstance(trace, Factors))
        if not is_value or not is_zeros(call.find(other)):
            return False
        self.log.put(y, Factors(self.split_product(x)))
        return True

    def follow_factors(self, call: FollowedFunction) -> None:
        """Follow a product of the shape of a state, which a token may add to it."""
        args, y = call.args, call.y
        if call.core not in PRODUCTS or len(args) != 2 or call.kwargs or not all(isinstance(x, Tensor) for x in args):
            return
        are_factors = all(one is None or isinstance(one, Factors) for one in map(call.find, args))
        if are_factors and max(x.numel() for x in args) == y.numel():
            self.log.put(y, Factors(tuple(each for x in args for each in self.split_product(x))))

    def split_product(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the factors whose product entry by entry x is, or x itself."""
        trace = self.log.find(x)
        return trace.tensors if isinstance(trace, Factors) else (x,)

    def follow_function(self, call: FollowedFunction) -> None:
        """Follow a function of states that are vectors, times factors."""
        core, args, kwargs, y = call.core, call.args, call.kwargs, call.y
        pairs = [(x, trace if isinstance(trace := call.find(x), Channels) else None) for x in args]
        if core in VIEWS | COPIES and isinstance(y, Tensor) and pairs[0][1] is not None and y.numel() == args[0].numel():
            self.log.put(y, pairs[0][1].reshape(args[0].shape, y.shape))
        elif core == "neg" and pairs[0][1] is not None:
            self.log.put(y, pairs[0][1].multiply(-1))
        elif core in PRODUCTS and len(args) == 2 and not kwargs:
            if (found := find_scaled(pairs)) is not None:
                self.log.put(y, found)
        elif core in QUOTIENTS and len(args) == 2 and not kwargs:
            (_, first), (by, _) = pairs[::-1] if call.is_reversed else pairs
            if first is not None:
                self.log.put(y, first.multiply(1 / by if isinstance(by, int | float) else by.detach().reciprocal()))
        elif core in ("add", "sub", "subtract") and len(args) == 2:
            pairs = pairs[::-1] if call.is_reversed else pairs
            if any(is_zeros(call.find(x)) for x, _ in pairs):
                found = next(one for _, one in pairs if one is not None)
                if core == "add":
                    self.log.put(y, found.settle())
                return
            self.add(pairs, kwargs.get("alpha", 1) * (1 if core == "add" else -1), y)
        elif core == "addcmul" and len(args) == 3 and not kwargs:
            (_, state), *others = pairs
            if state is not None and not any(trace for _, trace in others):
                self.log.put(y, state.write(tuple(args[1:]), y.shape))
            elif state is None and (found := find_scaled(others)) is not None:
                self.log.put(y, found.write(self.split_product(args[0]), y.shape))

    def follow_mixture(self, call: FollowedFunction, mix: Mixture) -> None:
        """Follow the sum of two states, or of one and what a token adds, each times a factor of one gate, as a state."""
        first, second = call.find(mix.one), call.find(mix.other)
        if not isinstance(first, Channels) and (isinstance(second, Channels) or not is_zeros(first)):
            mix = Mixture(mix.other, mix.by_other, mix.one, mix.by, mix.gate)
            first, second = second, first
        scaled, y = first.multiply(mix.by, mix.gate) if isinstance(first, Channels) else None, call.y
        if scaled is not None and isinstance(second, Channels):
            other = second.multiply(mix.by_other, mix.gate)
            if (found := scaled.add(other) or other.add(scaled)) is not None:
                self.log.put(y, found)
        elif scaled is not None and is_zeros(second):
            self.log.put(y, scaled.settle())
        elif (second is None or isinstance(second, Factors)) and isinstance(mix.other, Tensor) and mix.other.shape == y.shape:
            by = mix.by_other if isinstance(mix.by_other, Tensor) else y.new_tensor(mix.by_other)
            added = (mix.gate if by is mix.gate else by.detach(), *self.split_product(mix.other))
            if scaled is not None:
                self.log.put(y, scaled.write(added, y.shape))
            elif is_zeros(first) and y.dim() > 1 and has_tokens(call.frame, mix.other):
                gates = (mix.gate,) if isinstance(mix.gate, Tensor) else ()
                self.log.put(y, Channels(ChannelState(None, None, added, y.shape, gates)))

    def start_at_first(self, frame: ModuleFrame, args: Any, y: Any) -> None:
        """Follow the first token of a longer tensor, multiplied by something of a later one, as the first state of a loop.

        If a state of its shape began as zeros, it is a token that is added to that.
        """
        for x in filter(may_be_picked, args):
            if x.shape == y.shape and y.shape not in self.log.start_shapes and self.log.find(x) is None:
                others = [weakref.ref(one) for one in args if isinstance(one, Tensor) and one is not x]
                if any(is_first(frame, x, others, n) for n in frame.list_lengths() if n >= MIN_TOKENS):
                    self.log.put(x, Channels(ChannelState(None, None, (x,), x.shape)))

    def add(self, pairs: Sequence[tuple[Any, Channels | None]], amount: float, y: Tensor) -> None:
        """Follow y, the sum of two values, of which the second is multiplied by a number, as a state."""
        (x, first), (other, second) = pairs
        second = None if second is None else second.multiply(amount)
        if first is not None and second is not None:
            joined = first.add(second) or second.add(first)
            if joined is not None:
                self.log.put(y, joined)
            return
        state, added = (first, other) if first is not None else (second, x)
        if state is None or not isinstance(added, Tensor):
            return
        factors = self.split_product(added)
        factors = (*factors, y.new_tensor(amount)) if first is not None and amount != 1 else factors
        self.log.put(y, state.write(factors, y.shape))

    def join(self, frame: ModuleFrame, core: str, args: Any, kwargs: Any, y: Any) -> None:
        """Keep what a function joins if all of it was read from states that are vectors."""
        entries = args[0] if args and isinstance(args[0], list | tuple) else ()
        found = [trace for x in entries if isinstance(trace := self.log.find(x), Channels)]
        if len(found) < 2 or len(found) < len(entries) or not isinstance(y, Tensor):
            return
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % y.dim()
        if core != "stack" and entries[0].shape[dim] != 1:
            return
        parts = [part.detach().clone() for part in (y.unbind(dim) if core == "stack" else y.split(1, dim))]
        loop = ChannelLoop(frame, core, found, parts)
        self.loops.append(loop)
        if self.log.outputs.is_active:
            numbers = torch.arange(y.numel(), device=y.device).view(y.shape)
            own = numbers.unbind(dim) if core == "stack" else numbers.split(1, dim)
            places = torch.stack([x.reshape(found[0].state.shape) for x in own], -1)
            self.log.outputs.channels = JoinedChannels(loop, places)

    def write(self, frame: ModuleFrame, args: Any, state: Channels) -> None:
        """Keep what is written to an entry of a tensor and was read from a state that is a vector."""
        buffer, y = args[0], args[-1]
        if len(args) < 3 or buffer.numel() <= y.numel():
            return
        loop = self.buffers.get(buffer)
        if loop is None or loop.frame is not frame:
            loop = self.buffers[buffer] = ChannelLoop(frame, "setitem")
            self.loops.append(loop)
        part = buffer[args[1]]
        is_view = share_memory(part, buffer)
        loop.places.append(part.data_ptr() if is_view else -1)  # of an index that is a tensor, whose place is not known
        loop.entries.append(state)
        loop.outputs.append(y.detach().clone())

    def take_loops(self, frame: ModuleFrame) -> list[ChannelLoop]:
        """Return the loops over vectors of a module that ends, and forget them."""
        if not self.loops and not self.buffers.data:
            return []
        ended = [one for one in self.loops if one.frame is frame]
        self.loops = [one for one in self.loops if one.frame is not frame]
        for x in [x for x, one in self.buffers.items() if one.frame is frame]:
            del self.buffers[x]
        return [one for one in ended if len(one.entries) > 1]


def find_scaled(pairs: Sequence[tuple[Any, Channels | None]]) -> Channels | None:
    """Return the product of a state with another value; None if it is none, or one of two states."""
    states = [(n, trace) for n, (_, trace) in enumerate(pairs) if trace is not None]
    if len(states) != 1:
        return None
    place, state = states[0]
    return state.multiply(pairs[1 - place][0])


def may_be_picked(x: Any) -> bool:
    """Return whether a value may be a tensor of one token of each row of a longer one, whose rows are further apart: quick."""
    if not isinstance(x, Tensor) or not (x._is_view() or x.is_inference()):
        return False
    is_plain = x.dim() > 1 and not x.is_nested and x.layout is torch.strided
    return is_plain and x.stride(0) * x.shape[0] >= MIN_TOKENS * x.numel() > 0


def is_first(frame: ModuleFrame, x: Tensor, others: Sequence[TensorRef], tokens: int) -> bool:
    """Return whether a tensor is the first of as many tokens as a module has, and others were made of later ones or of none."""
    ref, makers = weakref.ref(x), frame.find_makers(weakref.ref(x))
    places = [id(y) for y in makers[-1].results] if makers else []
    found = find_indices(makers[-1], tokens) if makers else []
    if id(ref) not in places or len(found) != len(places) or found[places.index(id(ref))] or not has_tokens(frame, x):
        return False
    are_weights = bool(others) and all(frame.find_contents(one) in (WEIGHT, LEARNED) for one in others)
    return are_weights or any(TokenPicks(frame, tokens).find_last(others).values())
