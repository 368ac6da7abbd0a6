"""The followed products, states and reads of loops, held by weak references, and the states that a later call may continue."""

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.recurrences.loop_outputs import LoopOutputs, change_rows
from regard.observe.interception.handwritten.recurrences.state_loop import (
    CHANGED,
    START,
    LeftState,
    Product,
    State,
    StateLoop,
    Trace,
)
from regard.observe.interception.lookups import read_version
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import copy_sample

MAX_LEFT = 8  # states of a module of which a copy is known again


class LeftSample(NamedTuple):
    """The shape of a state that a recorded loop has left, and some of its numbers (b, n)."""

    shape: torch.Size
    numbers: Tensor
    left: LeftState


class StateLog:
    """The loops of one forward with the traces of their tensors, and the states that those of earlier forwards have left."""

    def __init__(self) -> None:
        self.traces: dict[int, tuple[weakref.ref[Tensor], Trace, int]] = {}  # with versions, by the tensor's id
        self.table = AxisTable()
        self.outputs = LoopOutputs()
        self.loops: list[StateLoop] = []
        self.steps: weakref.WeakKeyDictionary[ModuleFrame, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
        self.start_shapes = set[torch.Size]()  # of zeros
        self.decay_shapes = set[torch.Size]()  # of exponentials of products, or of running sums of such logarithms
        self.log_shapes = set[torch.Size]()  # of the latter
        self.left = WeakTensorKeyDictionary()
        self.waiting: weakref.WeakSet[StateLoop] = weakref.WeakSet()  # of one token, which a caller may go on with
        self.read_modules: set[int] = set()  # ids of the modules whose loops were recorded
        self.left_samples: dict[int, deque[LeftSample]] = {}  # of the states that recorded loops have left, by module
        self.searched: weakref.WeakSet[ModuleFrame] = weakref.WeakSet()  # for copies of these

    def clear(self) -> None:
        """Forget all loops."""
        self.traces.clear()
        self.table.clear()
        self.outputs.clear()
        self.loops.clear()
        self.steps.clear()
        self.start_shapes.clear()
        self.decay_shapes.clear()
        self.log_shapes.clear()

    def follow_left_states(self) -> None:
        """Start at the states that recorded loops of earlier forwards have left."""
        for x, left in [*self.left.items()] if len(self.left) else ():
            self.leave(x, left)

    def follow_copies(self, frame: ModuleFrame) -> None:
        """Start at the arguments of a module that are copies of a state that a recorded loop of it has left, or of its rows."""
        if id(frame.module) not in self.left_samples or frame in self.searched:
            return
        self.searched.add(frame)
        for x in frame.input_tensors:
            found = [one for one in self.left_samples[id(frame.module)] if self.find(x) is None and is_copy(x, one)]
            if found:
                self.leave(x, found[-1].left)

    def leave(self, x: Tensor, left: LeftState) -> None:
        """Start a loop at a state that a recorded one has left, in this forward or in a later one."""
        initial = x if self.outputs.is_active else x.detach()
        self.start(x, StateLoop(initial.clone(), left) if bool(x.any()) else StateLoop())
        self.left[x] = left

    def start(self, x: Tensor, loop: StateLoop) -> State:
        """Follow x as the state before the first write of a loop."""
        self.start_shapes.add(x.shape)
        state = State(loop, (START,), self.table.add_dims(x.shape))
        self.put(x, state)
        return state

    def find(self, x: Any, writes: int = 0) -> Trace | None:
        """Return the trace of a tensor; None if it is not followed, or was written into more often than in this call.

        A state that was written into elsewhere makes its loop unreadable.
        """
        found = self.traces.get(id(x))
        if found is None or not isinstance(x, Tensor) or found[0]() is not x:
            return None
        _, trace, version = found
        if count_writes(x, trace) - version <= writes:
            return trace
        if isinstance(trace, State) and trace.loop.writes:
            trace.loop.reason = CHANGED
            return trace
        self.drop(x)
        return None

    def has_product(self, shape: torch.Size) -> bool:
        """Return whether a product of this shape is followed."""
        found = (ref() for ref, trace, _ in self.traces.values() if isinstance(trace, Product) and trace.is_plain)
        return any(x is not None and x.shape == shape for x in found)

    def put(self, x: Tensor, trace: Trace) -> None:
        """Follow a tensor until it is freed."""
        key, traces = id(x), self.traces

        def forget(gone: "weakref.ref[Tensor]") -> None:
            if key in traces and traces[key][0] is gone:
                del traces[key]

        traces[key] = weakref.ref(x, forget), trace, count_writes(x, trace)

    def drop(self, x: Tensor) -> None:
        """Stop following a tensor that was written into."""
        self.traces.pop(id(x), None)
        if len(self.left):
            self.left.pop(x, None)

    def take_loops(self, frame: ModuleFrame) -> Iterator[StateLoop]:
        """Generate the loops of a module that ends; one of a single token may go on in the module that called it.

        One in which no token decides any weight is a map if it has as many tokens as an input of the module.
        """
        for loop in [one for one in self.loops if one.frames and one.frames[-1] is frame]:
            is_whole = self.is_whole(loop, frame)
            if not is_whole and loop.has_token_weights:
                self.steps.setdefault(frame, []).append(loop.made[0])
            if is_whole or len(loop.frames) == 1:
                self.loops.remove(loop)
                if (is_whole or loop.has_several_tokens) and is_map(loop, frame):
                    loop.is_reported = loop.left is not None or loop.is_read_as_it_grows
                    yield loop
                continue
            known = [id(one.module) in self.read_modules for one in loop.frames]
            loop.frames.pop()
            if loop.left is None and not any(known):
                self.loops.remove(loop)
                self.waiting.add(loop)

    def is_whole(self, loop: StateLoop, frame: ModuleFrame) -> bool:
        """Return whether a loop is one of a module: of several tokens, or one that goes on where its earlier one ended."""
        if loop.left is not None:
            return id(frame.module) == loop.left.module
        return loop.has_several_tokens or id(frame.module) in self.read_modules

    def change_rows(self, frame: ModuleFrame, y: Tensor) -> Tensor:
        """Return what interventions make of y, the joined rows of a loop, if it is recorded when a module ends."""
        found, self.outputs.joined = self.outputs.joined, None
        if found is None or not (self.is_whole(found.loop, frame) and is_map(found.loop, frame)):
            return y
        return change_rows(found, self.table, y)

    def end_loop(self, loop: StateLoop, frame: ModuleFrame) -> None:
        """Follow the state that a recorded loop of a module has left, which another call may continue."""
        self.read_modules.add(id(frame.module))
        last = None if loop.last is None else loop.last()
        if last is not None:
            left = LeftState(id(frame.module), loop.has_rates, loop.weight_share)
            self.leave(last, left)
            samples = self.left_samples.setdefault(id(frame.module), deque(maxlen=MAX_LEFT))
            samples.append(LeftSample(last.shape, copy_sample(last.detach()), left))


def is_map(loop: StateLoop, frame: ModuleFrame) -> bool:
    """Return whether a loop is read, and has weights of tokens, or as many tokens as an input of a module."""
    has_weights = loop.has_token_weights or max(loop.depths, default=0) in frame.list_lengths()
    return has_weights and bool(loop.list_outputs())


def is_copy(x: Tensor, sample: LeftSample) -> bool:
    """Return whether each row of a tensor is one of a state, as far as some of their numbers show."""
    numbers = sample.numbers
    if x.shape[1:] != sample.shape[1:] or x.dtype != numbers.dtype or x.device != numbers.device or not bool(x.any()):
        return False
    return bool((copy_sample(x.detach()).unsqueeze(1) == numbers).all(-1).any(-1).all())


def count_writes(x: Tensor, trace: Trace) -> int:
    """Return how often a tensor and the factors that it is followed by were written into."""
    factors = trace.factors if isinstance(trace, Product) else ()
    return sum(map(read_version, (x, *factors)))
