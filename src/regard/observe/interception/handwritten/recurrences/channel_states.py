"""States that are vectors of channels, in loops over tokens: each is the last one times a factor, plus what a token adds.

A tensor is followed as a state times a factor. A sum of that with something else is a state of its own, so that what a loop
reads, as RWKV's average with a bonus for the token itself, may be another state than the one that it goes on with.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import Role
from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens
from regard.observe.interception.handwritten.products.score_form import COPIES, PRODUCTS, QUOTIENTS, VIEWS
from regard.observe.interception.handwritten.products.traces import share_memory
from regard.observe.interception.handwritten.recurrences.state_loop import (
    START,
    Channels,
    ChannelState,
    Factors,
    State,
    StateLoop,
    Trace,
)
from regard.observe.interception.handwritten.recurrences.state_reads import StateReads
from regard.observe.interception.provenance import ModuleFrame


@dataclass(eq=False)
class ChannelLoop:
    """What a loop over tokens joined of its states, in order, and the tensors that it joined, (b, ...) each."""

    frame: ModuleFrame
    function: str
    entries: list[Channels] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # in memory, of the entries that it wrote the outputs to


class ChannelStates(StateReads):
    """The states of the loops of one forward, of matrices and of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.channel_loops: list[ChannelLoop] = []
        self.channel_modules = weakref.WeakSet[nn.Module]()  # of which a loop or a scan over vectors was recorded
        self.start_shapes = set[torch.Size]()  # of zeros
        self.buffers = WeakTensorKeyDictionary()  # the loop that writes what it reads to a tensor

    def clear(self) -> None:
        """Forget all loops."""
        super().clear()
        self.channel_loops.clear()
        self.start_shapes.clear()
        self.buffers.clear()

    def start(self, x: Tensor, loop: StateLoop) -> State:
        """Follow x as the state before the first write of a loop."""
        self.start_shapes.add(x.shape)
        return super().start(x, loop)

    def start_channels(self, frames: list[ModuleFrame], state: State, other: Any, y: Tensor) -> None:
        """Follow y, the sum of zeros and tokens, as the first state of a loop."""
        is_start = state.places == (START,) and state.loop.initial is None
        if is_start and isinstance(other, Tensor) and y.dim() > 1 and other.shape == y.shape and has_tokens(frames[-1], other):
            self.put(y, Channels(ChannelState(None, None, self.split_product(other), y.shape)))

    def may_be_added(self, role: Role | None, y: Any) -> bool:
        """Return False only if y is no product of the shape of a state that began as zeros: quick."""
        return bool(self.start_shapes) and role is Role.MULTIPLY and isinstance(y, Tensor) and y.shape in self.start_shapes

    def follow_factors(self, name: str, core: str, args: Any, kwargs: Any, traces: dict[int, Trace], y: Tensor) -> None:
        """Follow y, a product that a token may add to a state."""
        if core not in PRODUCTS or len(args) != 2 or kwargs or not all(isinstance(x, Tensor) for x in args):
            return
        known = [traces.get(id(x)) for x in args]
        if all(one is None or isinstance(one, Factors) for one in known) and max(x.numel() for x in args) == y.numel():
            self.put(y, Factors(tuple(each for x in args for each in self.split_product(x))))

    def split_product(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the factors whose product entry by entry x is, or x itself."""
        trace = self.find(x)
        return trace.tensors if isinstance(trace, Factors) else (x,)

    def follow_channels(
        self, frames: list[ModuleFrame], name: str, core: str, args: Any, kwargs: Any, traces: dict[int, Trace], y: Any
    ) -> None:
        """Follow a function of states that are vectors, times factors."""
        pairs = [(x, trace if isinstance(trace := traces.get(id(x)), Channels) else None) for x in args]
        if core in VIEWS | COPIES and isinstance(y, Tensor) and pairs[0][1] is not None and y.numel() == args[0].numel():
            self.put(y, pairs[0][1].reshape(args[0].shape, y.shape))
        elif core == "neg" and pairs[0][1] is not None:
            self.put(y, pairs[0][1].multiply(-1))
        elif core in PRODUCTS and len(args) == 2 and not kwargs:
            self.scale(pairs, y)
        elif core in QUOTIENTS and len(args) == 2 and not kwargs:
            (_, first), (by, _) = pairs[::-1] if name.startswith("__r") else pairs
            if first is not None:
                self.put(y, first.multiply(1 / by if isinstance(by, int | float) else by.detach().reciprocal()))
        elif core in ("add", "sub", "subtract") and len(args) == 2:
            pairs = pairs[::-1] if name.startswith("__r") else pairs
            self.add(frames, pairs, kwargs.get("alpha", 1) * (1 if core == "add" else -1), y)
        elif core == "addcmul" and len(args) == 3 and not kwargs:
            (_, state), *others = pairs
            if state is not None and not any(trace for _, trace in others):
                self.put(y, state.write(tuple(args[1:]), y.shape))
            elif state is None and (found := self.find_scaled(others)) is not None:
                self.put(y, found.write(self.split_product(args[0]), y.shape))
        elif core == "lerp" and len(args) == 3 and pairs[0][1] is not None and pairs[1][1] is None and pairs[2][1] is None:
            self.put(y, pairs[0][1].multiply(1 - args[2]).write((args[2], args[1]), y.shape))

    def find_scaled(self, pairs: Sequence[tuple[Any, Channels | None]]) -> Channels | None:
        """Return the product of a state with another value; None if it is none, or one of two states."""
        states = [(n, trace) for n, (_, trace) in enumerate(pairs) if trace is not None]
        if len(states) != 1:
            return None
        place, state = states[0]
        return state.multiply(pairs[1 - place][0])

    def scale(self, pairs: Sequence[tuple[Any, Channels | None]], y: Tensor) -> None:
        """Follow the product y of a state with another value."""
        found = self.find_scaled(pairs)
        if found is not None:
            self.put(y, found)

    def add(self, frames: list[ModuleFrame], pairs: Sequence[tuple[Any, Channels | None]], amount: float, y: Tensor) -> None:
        """Follow y, the sum of two values, of which the second is multiplied by a number, as a state."""
        (x, first), (other, second) = pairs
        second = None if second is None else second.multiply(amount)
        if first is not None and second is not None:
            joined = first.add(second) or second.add(first)
            if joined is not None:
                self.put(y, joined)
            return
        state, added = (first, other) if first is not None else (second, x)
        if state is None or not isinstance(added, Tensor):
            return
        factors = self.split_product(added)
        factors = (*factors, y.new_tensor(amount)) if first is not None and amount != 1 else factors
        self.put(y, state.write(factors, y.shape))

    def join_channels(self, frames: list[ModuleFrame], core: str, args: Any, kwargs: Any, y: Any) -> None:
        """Keep what a function joins if all of it was read from states that are vectors."""
        entries = args[0] if args and isinstance(args[0], list | tuple) else ()
        found = [trace for x in entries if isinstance(trace := self.find(x), Channels)]
        if len(found) < 2 or len(found) < len(entries) or not isinstance(y, Tensor):
            return
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % y.dim()
        if core != "stack" and entries[0].shape[dim] != 1:
            return
        parts = [part.detach().clone() for part in (y.unbind(dim) if core == "stack" else y.split(1, dim))]
        self.channel_loops.append(ChannelLoop(frames[-1], core, found, parts))

    def write_channels(self, frames: list[ModuleFrame], args: Any, state: Channels) -> None:
        """Keep what is written to an entry of a tensor and was read from a state that is a vector."""
        buffer, y = args[0], args[-1]
        if len(args) < 3 or buffer.numel() <= y.numel():
            return
        loop = self.buffers.get(buffer)
        if loop is None or loop.frame is not frames[-1]:
            loop = self.buffers[buffer] = ChannelLoop(frames[-1], "setitem")
            self.channel_loops.append(loop)
        part = buffer[args[1]]
        is_view = share_memory(part, buffer)
        loop.places.append(part.data_ptr() if is_view else -1)  # of an index that is a tensor, whose place is not known
        loop.entries.append(state)
        loop.outputs.append(y.detach().clone())

    def take_channel_loops(self, frame: ModuleFrame) -> list[ChannelLoop]:
        """Return the loops over vectors of a module that ends, and forget them."""
        ended = [one for one in self.channel_loops if one.frame is frame]
        self.channel_loops = [one for one in self.channel_loops if one.frame is not frame]
        for x in [x for x, one in self.buffers.items() if one.frame is frame]:
            del self.buffers[x]
        return [one for one in ended if len(one.entries) > 1]
