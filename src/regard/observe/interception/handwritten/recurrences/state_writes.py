"""What a loop writes to its states: a decay multiplies a state, and a product of a key with a value is added to it."""

from typing import Any

from torch import Tensor

from regard.observe.interception.handwritten.products.score_form import PRODUCTS, QUOTIENTS
from regard.observe.interception.handwritten.recurrences.outer_products import (
    count_token_factors,
    expand_value,
    multiply_by_number,
    multiply_entries,
    read_factor,
)
from regard.observe.interception.handwritten.recurrences.state_loop import (
    START,
    Decay,
    Factors,
    Product,
    ReadTrace,
    State,
    StateLoop,
    Trace,
    Write,
)
from regard.observe.interception.handwritten.recurrences.state_traces import StateTraces
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import copy_sample


class StateWrites(StateTraces):
    """The states of the loops of one forward, by the products and sums that make them."""

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
        elif isinstance(first, State) and (second is None or isinstance(second, Factors)):
            self.start_channels(frames, first, args[1], y)
        elif isinstance(second, State) and (first is None or isinstance(first, Factors)):
            self.start_channels(frames, second, args[0], y)
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

    def start_channels(self, frames: list[ModuleFrame], state: State, other: Any, y: Tensor) -> None:
        """Do nothing: ChannelStates follows y, the sum of zeros and tokens, as the first state of a loop."""

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


def is_zero(x: Any) -> bool:
    """Return whether a value is the number 0."""
    return isinstance(x, int | float) and x == 0


def find_term_traces(first: Trace | None, second: Trace | None) -> tuple[Trace | None, Trace | None]:
    """Return the traces of what is added up, of two states as one state and one product, if one of them was a product."""
    if isinstance(first, State) and isinstance(second, State) and not (first.decays and second.decays):
        return (first, second.product) if second.product is not None and not second.decays else (first.product, second)
    return first, second
