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
from regard.observe.interception.handwritten.ancestor_search import has_tokens
from regard.observe.interception.handwritten.contraction import find_operands
from regard.observe.interception.handwritten.labelled_product import label_product
from regard.observe.interception.handwritten.linear_attention import list_axes
from regard.observe.interception.handwritten.outer_products import (
    OUTER,
    can_view,
    count_token_factors,
    expand_value,
    is_outer_product,
    label_operands,
    multiply_by_number,
    multiply_entries,
    multiply_operands,
    read_factor,
)
from regard.observe.interception.handwritten.score_form import (
    COPIES,
    PERMUTES,
    PRODUCTS,
    QUOTIENTS,
    VIEWS,
    follow_dims,
    is_view_index,
)
from regard.observe.interception.handwritten.state_loop import (
    START,
    Decay,
    Factor,
    LeftState,
    Product,
    Read,
    ReadTrace,
    State,
    StateLoop,
    Trace,
    Write,
)
from regard.observe.interception.handwritten.state_traces import StateTraces
from regard.observe.interception.handwritten.tensor_axes import Dims
from regard.observe.interception.handwritten.traces import is_followable
from regard.observe.interception.handwritten.undivided_contexts import PARTS
from regard.observe.interception.provenance import ModuleFrame, find_tensors, has_own_data, list_objects
from regard.observe.interception.recurrent.recurrence_call import copy_sample

ZEROS = {"zeros", "zeros_like", "new_zeros"}
JOINS = {"stack", "cat", "concat", "concatenate"}
LAYOUTS = VIEWS | PERMUTES | COPIES | PARTS | {"expand", "expand_as", "broadcast_to"}
RESHAPES = VIEWS - {"squeeze", "unsqueeze"}
SEVERAL = "its states are read by a product of more than two tensors, or one that adds to another tensor"


class LoopTracker(StateTraces):
    """The loops of one forward, followed from operation to operation."""

    def may_follow(self, role: Role | None, name: str, args: Any, kwargs: Any, y: Any) -> bool:
        """Return False only if a function neither has a followed argument nor makes zeros or an outer product: quick."""
        if name in ZEROS or is_outer_product(role, name, args, y) or (role is Role.MULTIPLY and is_zero(args[-1])):
            return True
        return bool(self.traces) and not self.traces.keys().isdisjoint(map(id, list_objects(args, kwargs)))

    def follow_function(
        self, frames: list[ModuleFrame], func: Any, name: str, role: Role | None, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Follow a function, unless torch.func transforms it."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return
        core = name if name in PERMUTES else strip_affixes(name)
        if core in JOINS:
            self.follow_joined(core, args, kwargs, result)
            return
        tensors = find_tensors(args, kwargs)
        traces = {id(x): trace for x in tensors if (trace := self.find(x, int(x is result))) is not None}
        if any(x is result for x in tensors):
            self.drop(result)
        if core in ("setitem", "copy"):
            self.follow_written(args, traces)
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
        elif role is Role.ADD:
            self.follow_addition(frames, name, core, args, kwargs, traces, result)
        elif role is Role.PRODUCT or core in OUTER:
            self.follow_contraction(frames, name, core, args, kwargs, traces, result)
        elif core == "sum":
            self.follow_sum(args, kwargs, traces, result)
        elif core in ("exp", "neg") and isinstance(trace := traces.get(id(args[0])), Product) and trace.is_plain:
            factors = trace.factors if core == "exp" else (*trace.factors, expand_value(-1, result))
            self.put(result, trace._replace(factors=factors, is_exponential=core == "exp"))

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
        else:
            parts = []
            for one in trace.factors:
                if core in RESHAPES and not can_view(one, result):
                    return  # to copy what is expanded takes as much memory as the product
                part = one.view(result.shape) if core in RESHAPES else func(one, *args[1:], **kwargs)
                parts.append([part] if isinstance(part, Tensor) else part)
            for y, factors in zip(results, zip(*parts, strict=True), strict=True):
                self.put(y, trace._replace(factors=factors))

    def follow_written(self, args: Any, traces: dict[int, Trace]) -> None:
        """Follow a tensor that a state is written into as a whole, as a buffer that holds the state."""
        x, y, trace = args[0], args[-1], traces.get(id(args[-1]))
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

    def follow_multiplication(
        self, frames: list[ModuleFrame], name: str, core: str, args: Any, kwargs: Any, traces: dict[int, Trace], y: Tensor
    ) -> None:
        """Follow an entrywise product: a state times a decay, or a product of factors."""
        if core == "addcmul":
            state, product = traces.get(id(args[0])), multiply_entries(args[1:], traces, y) if len(args) == 3 else None
            if isinstance(state, State) and product is not None:
                product = product._replace(token_factors=count_token_factors(frames[-1], args[1:], traces))
                self.write(frames, state, multiply_by_number(product, kwargs.get("value", 1), y), y)
            return
        if core in QUOTIENTS and len(args) == 2 and id(args[0]) in traces and not name.startswith("__r") and not kwargs:
            args = args[0], args[1].reciprocal() if isinstance(args[1], Tensor) else 1 / args[1]
        elif core not in PRODUCTS or len(args) != 2:
            return
        if any(map(is_zero, args)):
            if y.dim() > 1:
                self.start(y, StateLoop())
            return
        first, second = (traces.get(id(x)) for x in args)
        if isinstance(first, State) and not isinstance(second, State):
            self.decay(frames, first, args[1], second, y)
        elif isinstance(second, State) and not isinstance(first, State):
            self.decay(frames, second, args[0], first, y)
        elif (product := multiply_entries(args, traces, y)) is not None:
            self.put(y, product._replace(token_factors=count_token_factors(frames[-1], args, traces)))

    def decay(self, frames: list[ModuleFrame], state: State, by: Any, trace: Trace | None, y: Tensor) -> State | None:
        """Follow y, a state that was multiplied by a value, or by queries or keys that are summed next."""
        dims = self.table.align(state.dims, y.shape)
        if dims is None or isinstance(trace, ReadTrace):
            return None
        if not state.loop.has_token_weights:
            state.loop.has_token_weights = count_token_factors(frames[-1], [by], {id(by): trace} if trace else {}) > 0
        exponents = trace.factors if isinstance(trace, Product) and trace.is_exponential else ()
        factor, *rest = (read_factor(expand_value(one, y), dims) for one in (by, *exponents))
        decayed = state._replace(dims=dims, decays=(*state.decays, Decay(factor, tuple(rest))))
        self.put(y, decayed)
        return decayed

    def follow_addition(
        self, frames: list[ModuleFrame], name: str, core: str, args: Any, kwargs: Any, traces: dict[int, Trace], y: Tensor
    ) -> None:
        """Follow a sum: a state and what is written to it, or a value without what its key reads."""
        if len(args) != 2 or kwargs.get("alpha", 1) != 1:
            return
        args, frame = args[::-1] if core != "add" and name.startswith("__r") else args, frames[-1]
        first, second = find_term_traces(traces.get(id(args[0])), traces.get(id(args[1])))
        if core != "add":
            if isinstance(second, ReadTrace) and not isinstance(first, State | ReadTrace):
                self.put(y, Product((expand_value(args[0], y),), False, second, count_token_factors(frame, args[:1], traces)))
            elif isinstance(first, ReadTrace) and not isinstance(second, State | ReadTrace):
                factors = expand_value(args[1], y), expand_value(-1, y)
                self.put(y, Product(factors, False, first, count_token_factors(frame, args[1:], traces)))
            elif isinstance(second, Product) and isinstance(first, State):
                self.write(frames, first, multiply_by_number(second, -1, y), y)
        elif isinstance(first, State) and isinstance(second, Product):
            self.write(frames, first, second, y)
        elif isinstance(second, State) and isinstance(first, Product):
            self.write(frames, second, first, y)
        elif not isinstance(first, State | ReadTrace) and not isinstance(second, State | ReadTrace):
            products = [one for one in (first, second) if isinstance(one, Product) and one.is_plain]
            other = next((x for x, one in zip(args, (first, second), strict=True) if one is None), None)
            is_sure = all(one.token_factors > 1 for one in products)
            if len(products) == 2 and is_sure:
                last, decayed = sorted(products, key=lambda one: len(one.factors))
                self.start_from_product(frames, decayed, last, y)
            elif len(products) == 1 and is_zero(other):
                self.write(frames, self.start(y, StateLoop()), products[0], y)
            elif len(products) == 1 and is_sure and isinstance(other, Tensor) and other.shape == y.shape:
                self.write(frames, self.start(y, StateLoop(copy_sample(other))), products[0], y)

    def start_from_product(self, frames: list[ModuleFrame], first: Product, second: Product, y: Tensor) -> None:
        """Follow y as the second state of a loop that starts without zeros: what multiplies the first product is a decay."""
        count = len(second.factors)
        self.write(frames, self.start(y, StateLoop()), Product(first.factors[:count], token_factors=second.token_factors), y)
        state = self.find(y)
        for by in first.factors[count:]:
            state = self.decay(frames, state, by, None, y) if isinstance(state, State) else None
        if isinstance(state, State):
            self.write(frames, state, second, y)

    def write(self, frames: list[ModuleFrame], state: State, product: Product, y: Tensor) -> None:
        """Follow y, the sum of a state and a product, as the next state."""
        loop, correction = state.loop, product.correction
        if state.time or product.is_exponential or (correction is not None and correction.loop is not loop):
            return
        is_first = state.places == (START,)
        if is_first and loop.writes and loop.first_frame is not frames[-1]:  # layers that start from the same zeros
            loop = StateLoop(loop.initial, loop.left, has_token_weights=loop.has_token_weights)
        if not loop.writes:
            fits = self.table.align(state.dims, y.shape) == state.dims
            loop.dims, loop.shape = state.dims if fits else self.table.add_dims(y.shape), y.shape
            self.loops.append(loop)
        elif loop in self.waiting:
            self.waiting.remove(loop)
            self.loops.append(loop)
        is_same = self.table.expand_dims(state.dims) == self.table.expand_dims(loop.dims)
        if y.shape != loop.shape or not (is_same or is_first):
            return
        factors = tuple(read_factor(expand_value(one, y), loop.dims) for one in product.factors)
        place = None if correction is None else correction.place
        written = Write(state.places[0], state.decays if is_same else (), factors, place, product.token_factors)
        self.put(y, State(loop, (loop.add_write(frames, written, y),), loop.dims))

    def follow_contraction(
        self, frames: list[ModuleFrame], name: str, core: str, args: Any, kwargs: Any, traces: dict[int, Trace], y: Tensor
    ) -> None:
        """Follow a product that sums over axes: a query that reads a state, or an outer product."""
        operands = find_operands(name, args, kwargs)
        states = [(n, one) for n, x in enumerate(operands) if isinstance(one := traces.get(id(x)), State)]
        product = label_product(name, operands, args, kwargs)
        added = None if product is None else product.added
        if not states and product is not None and product.sums_several():
            states = self.start_at_read(frames, operands, traces)
        if not states:
            outer = multiply_operands(operands, *label_operands(product, core, args, operands), traces, y)
            before = None if added is None else traces.get(id(added[0]))
            if outer is not None:
                outer = outer._replace(token_factors=count_token_factors(frames[-1], operands, traces))
            if outer is not None and added is None:
                self.put(y, outer)
            elif outer is not None and isinstance(before, State) and added is not None and product is not None:
                state = before if added[1] == 1 else self.decay(frames, before, added[1], None, y)
                if state is not None:  # as baddbmm adds it
                    self.write(frames, state, multiply_by_number(outer, product.factor, y), y)
            return
        place, state = states[0]
        others = [x for n, x in enumerate(operands) if n != place]
        if product is None or added is not None or len(states) > 1:
            if len(states) == 1 and all(has_tokens(frames[-1], x) for x in others):
                state.loop.reason = SEVERAL
            return
        dims = product.build_dims(self.table, {place: state.dims})
        query = read_factor(others[0], dims[1 - place])
        is_own = list_axes(self.table, query.dims) <= list_axes(self.table, state.dims)
        is_of_tokens = has_tokens(frames[-1], others[0])
        if not is_own and not is_of_tokens:
            return  # a layer that transforms a state reads nothing from it
        state.loop.has_token_weights |= is_of_tokens
        if list_axes(self.table, state.dims) - list_axes(self.table, dims[2]):
            query = query if product.factor == 1 else Factor(query.tensor * product.factor, query.dims)
            self.read(state, query, dims[2], y, core)
        elif is_own:
            self.put(y, state._replace(dims=dims[2], decays=(*state.decays, Decay(query))))

    def start_at_read(
        self, frames: list[ModuleFrame], operands: list[Tensor], traces: dict[int, Trace]
    ) -> list[tuple[int, State]]:
        """Follow a product that a query reads as the first state of a loop without zeros; return it with its place."""
        products = [(n, one) for n, x in enumerate(operands) if isinstance(one := traces.get(id(x)), Product)]
        found = [(n, one) for n, one in products if one.is_plain and one.token_factors > 1]
        others = [x for x in operands if id(x) not in traces]
        if len(found) != 1 or not others or not has_tokens(frames[-1], others[0]):
            return []
        (place, product), x = found[0], operands[found[0][0]]
        self.write(frames, self.start(x, StateLoop()), product, x)
        state = self.find(x)
        assert isinstance(state, State)
        state = state._replace(product=product)
        self.put(x, state)
        return [(place, state)]

    def follow_sum(self, args: Any, kwargs: Any, traces: dict[int, Trace], y: Tensor) -> None:
        """Follow the sum of a state that a query was multiplied by."""
        state, dim = traces.get(id(args[0])), kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(state, State) or not state.decays or dim is None:
            return
        summed = {n % args[0].dim() for n in ([dim] if isinstance(dim, int) else dim)}
        keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        dims = tuple(() if n in summed else axes for n, axes in enumerate(state.dims) if keeps or n not in summed)
        *decays, last = state.decays
        if list_axes(self.table, last.factor.dims) - list_axes(self.table, dims):
            self.read(state._replace(decays=tuple(decays)), last.factor, dims, y, "mul and sum")

    def read(self, state: State, query: Factor, dims: Dims, y: Tensor, function: str) -> None:
        """Follow y, what a query reads from states; a copy is kept, since y may be written into."""
        output = Factor(y.detach().clone(), dims)
        state.loop.reads.append(Read(state.places, state.time, state.decays, query, output, function, weakref.ref(y)))
        self.put(y, ReadTrace(state.loop, len(state.loop.reads) - 1))

    def take_loops(self, frame: ModuleFrame) -> Iterator[StateLoop]:
        """Generate the loops of a module that ends; one of a single token may go on in the module that called it.

        One in which no token decides any weight is no map.
        """
        module = id(frame.module)
        for loop in [one for one in self.loops if one.frames and one.frames[-1] is frame]:
            is_whole = loop.has_several_tokens or module in self.read_modules
            if loop.left is not None:
                is_whole = module == loop.left.module
            if is_whole or len(loop.frames) == 1:
                self.loops.remove(loop)
                if (is_whole or loop.has_several_tokens) and loop.has_token_weights and loop.list_outputs():
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


@cache
def may_start_loop(role: Role | None, name: str) -> bool:
    """Return whether a function of this name may make zeros or an outer product. Cached per name."""
    return role in (Role.MULTIPLY, Role.PRODUCT) or name in ZEROS or name in OUTER


def is_zero(x: Any) -> bool:
    """Return whether a value is the number 0."""
    return isinstance(x, int | float) and x == 0


def find_term_traces(first: Trace | None, second: Trace | None) -> tuple[Trace | None, Trace | None]:
    """Return the traces of what is added up, of two states as one state and one product, if one of them was a product."""
    if isinstance(first, State) and isinstance(second, State) and not (first.decays and second.decays):
        return (first, second.product) if second.product is not None and not second.decays else (first.product, second)
    return first, second
