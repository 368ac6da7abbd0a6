"""Loops that a model writes out: a state decays, a product of a key with a value is added to it, and a query reads it.

Products of factors, states, and what was read from a state are followed, each by the functions of one file; their traces are in
one log. Following starts at a tensor of zeros or at an outer product, so that a model without such loops pays one look-up for
each operation.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import ZEROS
from regard.observe.interception.handwritten.products.score_form import PERMUTES
from regard.observe.interception.handwritten.products.traces import is_followable
from regard.observe.interception.handwritten.recurrences.channel_changes import change_channels
from regard.observe.interception.handwritten.recurrences.channel_scans import ChannelScan, ScanRounds, may_shift
from regard.observe.interception.handwritten.recurrences.channel_states import ChannelLoop, ChannelStates
from regard.observe.interception.handwritten.recurrences.followed_function import MIXES, FollowedFunction, Mixture
from regard.observe.interception.handwritten.recurrences.fourier_convolutions import TRANSFORMS, FourierConvolutions
from regard.observe.interception.handwritten.recurrences.outer_products import OUTER, expand_value, is_outer_product
from regard.observe.interception.handwritten.recurrences.running_sums import RunningSums
from regard.observe.interception.handwritten.recurrences.state_layouts import (
    LAYOUTS,
    follow_joined,
    follow_layout,
    follow_written,
)
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
from regard.observe.interception.handwritten.recurrences.state_loop import (
    Channels,
    Product,
    ReadTrace,
    RunningSum,
    Shifted,
    Spectrum,
    State,
    StateLoop,
)
from regard.observe.interception.handwritten.recurrences.state_reads import follow_contraction, follow_sum
from regard.observe.interception.handwritten.recurrences.state_scans import follow_scans, may_read_scan
from regard.observe.interception.handwritten.recurrences.state_writes import (
    follow_addition,
    follow_mixture,
    follow_multiplication,
    is_zero,
)
from regard.observe.interception.lookups import JOINS_PARTS, RUNNING
from regard.observe.interception.plain_tensors import has_own_data
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.tensor_arguments import find_tensors, list_objects
from regard.observe.interception.thread_state import STATE

STARTS_AT_FIRST = {"lerp", "lerp_"}
ENDS_ROUNDS = JOINS_PARTS | {"addcmul", "setitem", "copy", "getitem", "narrow", "where", "flatten", "reshape", "view"}


class LoopTracker:
    """The loops, scans and convolutions of one forward, followed from function to function."""

    def __init__(self) -> None:
        self.log = StateLog()
        self.channels = ChannelStates(self.log)
        self.running_sums = RunningSums(self.log)
        self.rounds = ScanRounds(self.log)
        self.convolutions = FourierConvolutions(self.log)
        self.traces, self.pairs = self.log.traces, self.rounds.pairs  # looked at for every function
        self.outputs = self.log.outputs

    def clear(self) -> None:
        """Forget all of them."""
        for one in (self.log, self.channels, self.running_sums, self.rounds, self.convolutions):
            one.clear()

    def restart(self) -> None:
        """Forget all of them, and start again at the states that recorded loops have left."""
        self.clear()
        self.outputs.is_active = any(watcher.can_change_calls for watcher in STATE.watchers)
        self.log.follow_left_states()

    def may_follow(self, role: Role | None, name: str, args: Any, kwargs: Any, y: Any) -> bool:
        """Return False only if a function neither has a followed argument nor makes zeros or an outer product: quick."""
        if name in ZEROS or is_outer_product(role, name, args, y) or (role is Role.MULTIPLY and is_zero(args[-1])):
            return True
        is_moved = name == "pad" or (name in JOINS_PARTS and may_shift(args))
        if is_moved or name in RUNNING or name in TRANSFORMS or self.may_be_added(role, y):
            return True
        return bool(self.traces) and not self.traces.keys().isdisjoint(map(id, list_objects(args, kwargs)))

    def may_be_added(self, role: Role | None, y: Any) -> bool:
        """Return False only if y is no product of the shape of a state that began as zeros: quick."""
        shapes = self.log.start_shapes
        return bool(shapes) and role is Role.MULTIPLY and isinstance(y, Tensor) and y.shape in shapes

    def follow_function(
        self, frames: list[ModuleFrame], func: Any, name: str, role: Role | None, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Follow a function, unless it does nothing that is followed, or torch.func transforms it."""
        log, frame = self.log, frames[-1]
        for one in frames if log.left_samples else ():
            log.follow_copies(one)
        if role is Role.MULTIPLY or name in STARTS_AT_FIRST:
            self.channels.start_at_first(frame, args, result)
        reads_scan, starts_rounds = may_read_scan(log, role, args), self.rounds.may_start(role, args)
        ends_rounds = bool(self.pairs) and may_end_rounds(role, name) and isinstance(result, Tensor)
        if not (reads_scan or starts_rounds or ends_rounds or self.may_follow(role, name, args, kwargs, result)):
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        core = name if name in PERMUTES else strip_affixes(name)
        with nullcontext() if self.outputs.is_active or not torch.is_grad_enabled() else torch.no_grad():
            if ends_rounds:
                self.rounds.find_states(frame, result)
            if starts_rounds:
                self.rounds.start(frame, args, core)
            self.follow_tensors(role, FollowedFunction(frames, func, name, core, args, kwargs, {}, result), reads_scan)

    def follow_tensors(self, role: Role | None, call: FollowedFunction, reads_scan: bool) -> None:
        """Follow a function that may read a scan. What is kept of it has gradients if they are on."""
        log, args, kwargs, result = self.log, call.args, call.kwargs, call.y
        if call.core in JOINS_PARTS:
            if self.outputs.is_active:
                rows = [log.find(x) for x in list_objects(args[:1], {})]
                self.outputs.join(call.frame, call.func, args, kwargs, rows, result)
            follow_joined(log, call.core, args, kwargs, result)
            self.rounds.follow_joined(call)
            self.channels.join(call.frame, call.core, args, kwargs, result)
            return
        tensors = find_tensors(args, kwargs)
        if reads_scan:
            follow_scans(log, call.frames, tensors)
        traces = {id(x): trace for x in tensors if (trace := log.find(x, int(x is result))) is not None}
        if any(x is result for x in tensors):
            log.drop(result)
        self.follow_call(role, call._replace(traces=traces))

    def follow_call(self, role: Role | None, call: FollowedFunction) -> None:
        """Follow a function by what its arguments are, or else by what it computes."""
        core, kinds = call.core, {type(trace) for trace in call.traces.values()}
        if core in ("setitem", "copy"):
            if isinstance(trace := call.find(call.args[-1]), Channels):
                self.channels.write(call.frame, call.args, trace)
            elif isinstance(trace, ReadTrace) and len(call.args) == 3:
                self.outputs.write(call.frame, call.args[0], call.args[1], trace)
            follow_written(self.log, call.args, trace)
        elif core in MIXES:
            if (mix := call.read_mixture()) is not None:
                self.follow_mixture(call, mix, kinds)
        elif Channels in kinds:
            self.channels.follow_function(call)
        elif core == "pad" or Shifted in kinds:
            self.rounds.follow_shift(call)
        elif core in TRANSFORMS or Spectrum in kinds:
            self.convolutions.follow_function(call)
        elif core in RUNNING or RunningSum in kinds:
            self.running_sums.follow_function(call)
        elif core in LAYOUTS:
            follow_layout(self.log, call)
        elif is_followable(call.y) and has_own_data(call.y) and call.y.numel():
            self.follow_result(role, call)

    def follow_mixture(self, call: FollowedFunction, mix: Mixture, kinds: set[type]) -> None:
        """Follow a function that mixes two values by a gate or a mask, of states that are vectors or matrices."""
        are_states = all(isinstance(call.find(x), State) for x in (mix.one, mix.other))
        if Channels in kinds or not (are_states or Product in kinds):
            self.channels.follow_mixture(call, mix)
        else:
            follow_mixture(self.log, call, mix)

    def follow_result(self, role: Role | None, call: FollowedFunction) -> None:
        """Follow a function that makes numbers of states or products, or starts either."""
        log, core, y = self.log, call.core, call.y
        if core in ZEROS:
            if y.dim() > 1:
                log.start(y, StateLoop())
        elif role is Role.MULTIPLY:
            follow_multiplication(log, call)
            if self.may_be_added(role, y) and id(y) not in log.traces:
                self.channels.follow_factors(call)
        elif role is Role.ADD:
            if not self.channels.follow_start(call):
                follow_addition(log, call)
        elif role is Role.PRODUCT or core in OUTER:
            follow_contraction(log, call)
        elif core == "sum":
            follow_sum(log, call)
        elif core in ("exp", "neg") and isinstance(trace := call.find(call.args[0]), Product) and trace.is_plain:
            factors = trace.factors if core == "exp" else (*trace.factors, expand_value(-1, y))
            log.put(y, trace._replace(factors=factors, is_exponential=core == "exp"))
            log.decay_shapes |= {y.shape} if core == "exp" else set()

    def change_rows(self, frame: ModuleFrame, y: Tensor) -> Tensor:
        """Return what interventions make of y, the joined rows of a loop."""
        channels, self.outputs.channels = self.outputs.channels, None
        if channels is not None:
            self.outputs.joined = None
            return change_channels(channels, y)
        return self.log.change_rows(frame, y)

    def take_channel_loops(self, frame: ModuleFrame) -> tuple[list[ChannelLoop], list[ChannelScan]]:
        """Return the loops and the scans over vectors of a module that ends, and forget them."""
        return self.channels.take_loops(frame), self.rounds.take(frame) + self.running_sums.take(frame)


@cache
def may_end_rounds(role: Role | None, name: str) -> bool:
    """Return whether a function of this name may join or add the states of the last round of a scan. Cached per name."""
    return role is Role.ADD or strip_affixes(name) in ENDS_ROUNDS


@cache
def may_start_loop(role: Role | None, name: str) -> bool:
    """Return whether a function of this name may make zeros or an outer product, or mix or join tokens. Cached per name."""
    starts = (ZEROS, OUTER, RUNNING, TRANSFORMS, STARTS_AT_FIRST, JOINS_PARTS, {"pad"})
    return role in (Role.MULTIPLY, Role.PRODUCT) or any(name in names for names in starts)
