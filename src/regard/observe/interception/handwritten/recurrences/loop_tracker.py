"""Loops that a model writes out: a state decays, a product of a key with a value is added to it, and a query reads it.

Three kinds of tensors are followed: products of factors, states, and what was read from a state. Following starts at a tensor
of zeros or at an outer product, so that a model without such loops pays one look-up for each operation.
"""

import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import ZEROS
from regard.observe.interception.handwritten.products.score_form import COPIES, PERMUTES, VIEWS, follow_dims, is_view_index
from regard.observe.interception.handwritten.products.traces import is_followable
from regard.observe.interception.handwritten.recurrences.fourier_convolutions import TRANSFORMS, FourierConvolutions
from regard.observe.interception.handwritten.recurrences.outer_products import OUTER, can_view, expand_value, is_outer_product
from regard.observe.interception.handwritten.recurrences.state_loop import (
    Channels,
    LeftState,
    Product,
    ReadTrace,
    RunningSum,
    Spectrum,
    State,
    StateLoop,
    Trace,
)
from regard.observe.interception.handwritten.recurrences.state_writes import is_zero
from regard.observe.interception.handwritten.softmax.undivided_contexts import PARTS
from regard.observe.interception.lookups import JOINS_PARTS, RUNNING
from regard.observe.interception.provenance import ModuleFrame, find_tensors, has_own_data, list_objects

LAYOUTS = VIEWS | PERMUTES | COPIES | PARTS | {"expand", "expand_as", "broadcast_to"}
ENDS_ROUNDS = JOINS_PARTS | {"addcmul", "setitem", "copy", "getitem", "narrow", "where", "flatten", "reshape", "view"}
RESHAPES = VIEWS - {"squeeze", "unsqueeze"}


class LoopTracker(FourierConvolutions):
    """The loops of one forward, followed from operation to operation."""

    def may_follow(self, role: Role | None, name: str, args: Any, kwargs: Any, y: Any) -> bool:
        """Return False only if a function neither has a followed argument nor makes zeros or an outer product: quick."""
        if name in ZEROS or is_outer_product(role, name, args, y) or (role is Role.MULTIPLY and is_zero(args[-1])):
            return True
        if name in RUNNING or name in TRANSFORMS or self.may_be_added(role, y):
            return True
        return bool(self.traces) and not self.traces.keys().isdisjoint(map(id, list_objects(args, kwargs)))

    def follow_function(
        self, frames: list[ModuleFrame], func: Any, name: str, role: Role | None, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Follow a function, unless it does nothing that is followed, or torch.func transforms it."""
        reads_scan, starts_rounds = self.may_read_scan(role, args), self.may_start_rounds(role, args)
        ends_rounds = bool(self.pairs) and may_end_rounds(role, name) and isinstance(result, Tensor)
        if not (reads_scan or starts_rounds or ends_rounds or self.may_follow(role, name, args, kwargs, result)):
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        core = name if name in PERMUTES else strip_affixes(name)
        if ends_rounds:
            self.find_states(frames, result)
        if starts_rounds:
            self.start_rounds(frames, args, core)
        if core in JOINS_PARTS:
            self.follow_joined(core, args, kwargs, result)
            self.join_channels(frames, core, args, kwargs, result)
            return
        tensors = find_tensors(args, kwargs)
        if reads_scan:
            self.follow_scans(frames, tensors)
        traces = {id(x): trace for x in tensors if (trace := self.find(x, int(x is result))) is not None}
        if any(x is result for x in tensors):
            self.drop(result)
        if core in ("setitem", "copy"):
            self.follow_written(frames, args, traces)
        elif any(isinstance(trace, Channels) for trace in traces.values()):
            self.follow_channels(frames, name, core, args, kwargs, traces, result)
        elif core in TRANSFORMS or any(isinstance(trace, Spectrum) for trace in traces.values()):
            self.follow_spectra(frames, core, args, kwargs, traces, result)
        elif core in RUNNING or any(isinstance(trace, RunningSum) for trace in traces.values()):
            self.follow_running(frames, name, core, args, kwargs, traces, result)
        elif core in LAYOUTS:
            trace = traces.get(id(args[0])) if args else None
            if trace is not None and not (name.endswith("_") and not name.endswith("__")):
                self.follow_layout(func, name, core, args, kwargs, trace, result)
        elif not is_followable(result) or not has_own_data(result) or not result.numel():
            return
        elif core in ZEROS:
            if result.dim() > 1:
                self.start(result, StateLoop())
        elif role is Role.MULTIPLY:
            self.follow_multiplication(frames, name, core, args, kwargs, traces, result)
            if self.may_be_added(role, result) and id(result) not in self.traces:
                self.follow_factors(name, core, args, kwargs, traces, result)
        elif role is Role.ADD:
            self.follow_addition(frames, name, core, args, kwargs, traces, result)
        elif role is Role.PRODUCT or core in OUTER:
            self.follow_contraction(frames, name, core, args, kwargs, traces, result)
        elif core == "sum":
            self.follow_sum(args, kwargs, traces, result)
        elif core in ("exp", "neg") and isinstance(trace := traces.get(id(args[0])), Product) and trace.is_plain:
            factors = trace.factors if core == "exp" else (*trace.factors, expand_value(-1, result))
            self.put(result, trace._replace(factors=factors, is_exponential=core == "exp"))
            self.decay_shapes |= {result.shape} if core == "exp" else set()

    def follow_layout(self, func: Any, name: str, core: str, args: Any, kwargs: Any, trace: Trace, result: Any) -> None:
        """Follow a function that changes a layout or takes parts, which is applied to each factor of a product."""
        results = [result] if isinstance(result, Tensor) else list(result)
        is_whole = len(results) == 1 and results[0].numel() == args[0].numel()
        if core in COPIES or isinstance(trace, ReadTrace):
            if is_whole:
                self.put(results[0], trace)
        elif isinstance(trace, State):
            dims = follow_dims(self.table, trace.dims, name, func, args, kwargs, args[0], results[0]) if is_whole else None
            if dims is not None:
                self.put(results[0], trace._replace(dims=dims))
        elif isinstance(trace, Product):
            parts = []
            for one in trace.factors:
                if core in RESHAPES and not can_view(one, result):
                    return  # to copy what is expanded takes as much memory as the product
                part = one.view(result.shape) if core in RESHAPES else func(one, *args[1:], **kwargs)
                parts.append([part] if isinstance(part, Tensor) else part)
            for y, factors in zip(results, zip(*parts, strict=True), strict=True):
                self.put(y, trace._replace(factors=factors))

    def follow_written(self, frames: list[ModuleFrame], args: Any, traces: dict[int, Trace]) -> None:
        """Follow a tensor that a state is written into as a whole, as a buffer that holds the state."""
        x, y, trace = args[0], args[-1], traces.get(id(args[-1]))
        if isinstance(trace, Channels):
            self.write_channels(frames, args, trace)
        is_whole = len(args) == 2 or is_view_index(args[1])
        if isinstance(trace, State) and is_whole and x.shape == y.shape:
            self.put(x, trace)
            trace.loop.last = weakref.ref(x)

    def follow_joined(self, core: str, args: Any, kwargs: Any, y: Any) -> None:
        """Follow the states of a loop that a function joins along a new axis."""
        entries = args[0] if args and isinstance(args[0], list | tuple) else ()
        states = [trace for x in entries if isinstance(trace := self.find(x), State)]
        if not states or len(states) < len(entries) or not isinstance(y, Tensor):
            return
        first, dim = states[0], kwargs.get("dim", args[1] if len(args) > 1 else 0) % y.dim()
        if any(one.loop is not first.loop or one.dims != first.dims or one.decays or one.time for one in states):
            return
        if core != "stack" and entries[0].shape[dim] != 1:
            return
        time = self.table.add_axis(len(states))
        dims = (*first.dims[:dim], time, *first.dims[dim + (core != "stack") :])
        self.put(y, State(first.loop, tuple(one.places[0] for one in states), dims, time=time))

    def take_loops(self, frame: ModuleFrame) -> Iterator[StateLoop]:
        """Generate the loops of a module that ends; one of a single token may go on in the module that called it.

        One in which no token decides any weight is a map if it has as many tokens as an input of the module.
        """
        module = id(frame.module)
        for loop in [one for one in self.loops if one.frames and one.frames[-1] is frame]:
            is_whole = loop.has_several_tokens or module in self.read_modules
            if loop.left is not None:
                is_whole = module == loop.left.module
            if is_whole or len(loop.frames) == 1:
                self.loops.remove(loop)
                is_map = loop.has_token_weights or max(loop.depths, default=0) in frame.list_lengths()
                if (is_whole or loop.has_several_tokens) and is_map and loop.list_outputs():
                    is_copy = loop.initial is not None and module in self.earlier_modules  # maybe of a state that this one left
                    loop.is_reported = loop.left is not None or (loop.is_read_as_it_grows and not is_copy)
                    yield loop
                continue
            known = [id(one.module) in self.read_modules for one in loop.frames]
            loop.frames.pop()
            if loop.left is None and not any(known):
                self.loops.remove(loop)
                self.waiting.add(loop)

    def end_loop(self, loop: StateLoop, frame: ModuleFrame) -> None:
        """Follow the state that a recorded loop of a module has left, which another call may continue."""
        self.read_modules.add(id(frame.module))
        last = None if loop.last is None else loop.last()
        if last is not None:
            self.leave(last, LeftState(id(frame.module), loop.has_rates))
            self.left_shapes.setdefault(id(frame.module), set()).add(last.shape)


@cache
def may_end_rounds(role: Role | None, name: str) -> bool:
    """Return whether a function of this name may join or add the states of the last round of a scan. Cached per name."""
    return role is Role.ADD or strip_affixes(name) in ENDS_ROUNDS


@cache
def may_start_loop(role: Role | None, name: str) -> bool:
    """Return whether a function of this name may make zeros or an outer product. Cached per name."""
    return role in (Role.MULTIPLY, Role.PRODUCT) or name in ZEROS or name in OUTER or name in RUNNING or name in TRANSFORMS
