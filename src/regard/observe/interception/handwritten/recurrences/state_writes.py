"""What a loop writes to its states: a decay multiplies a state, and a product of a key with a value is added to it."""

import weakref
from typing import Any

from torch import Tensor

from regard.observe.interception.handwritten.products.score_form import PRODUCTS, QUOTIENTS
from regard.observe.interception.handwritten.recurrences.followed_function import FollowedFunction, Mixture
from regard.observe.interception.handwritten.recurrences.learned_starts import start_loop
from regard.observe.interception.handwritten.recurrences.outer_products import (
    add_sources,
    count_token_factors,
    expand_value,
    list_sources,
    multiply_by_number,
    multiply_entries,
    read_factor,
)
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
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
from regard.observe.interception.provenance import ModuleFrame


def follow_multiplication(log: StateLog, call: FollowedFunction) -> None:
    """Follow an entrywise product: a state times a decay, or a product of factors."""
    args, core, y = call.args, call.core, call.y
    if core == "addcmul":
        state, product = call.find(args[0]), multiply_entries(args[1:], call.traces, y) if len(args) == 3 else None
        if isinstance(state, State) and product is not None:
            product = add_sources(product, call.frame, args[1:], call.traces)
            write_product(log, call.frames, state, multiply_by_number(product, call.kwargs.get("value", 1), y), y)
        return
    if core in QUOTIENTS and len(args) == 2 and id(args[0]) in call.traces and not call.is_reversed and not call.kwargs:
        args = args[0], args[1].reciprocal() if isinstance(args[1], Tensor) else 1 / args[1]
    elif core not in PRODUCTS or len(args) != 2:
        return
    if any(map(is_zero, args)):
        if y.dim() > 1:
            log.start(y, StateLoop())
        return
    first, second = map(call.find, args)
    if isinstance(first, State) and not isinstance(second, State):
        decay_state(log, call.frame, first, args[1], second, y)
    elif isinstance(second, State) and not isinstance(first, State):
        decay_state(log, call.frame, second, args[0], first, y)
    elif (product := multiply_entries(args, call.traces, y)) is not None:
        log.put(y, add_sources(product, call.frame, args, call.traces))


def follow_addition(log: StateLog, call: FollowedFunction) -> None:
    """Follow a sum: a state and what is written to it, or a value without what its key reads."""
    if len(call.args) != 2 or call.kwargs.get("alpha", 1) != 1:
        return
    args = call.args[::-1] if call.core != "add" and call.is_reversed else call.args
    first, second = find_term_traces(*map(call.find, args))
    if call.core != "add":
        follow_difference(log, call, args, first, second)
    elif isinstance(read := first if isinstance(first, ReadTrace) else second, ReadTrace):
        read.loop.sums.setdefault(read.place, call.y.detach().clone())
    elif isinstance(first, State) and isinstance(second, State):
        mix_states(log, first, second, call.y)
    elif isinstance(first, State) and isinstance(second, Product):
        write_product(log, call.frames, first, second, call.y)
    elif isinstance(second, State) and isinstance(first, Product):
        write_product(log, call.frames, second, first, call.y)
    elif not isinstance(first, State | ReadTrace) and not isinstance(second, State | ReadTrace):
        follow_first_sum(log, call, args, first, second)


def follow_difference(log: StateLog, call: FollowedFunction, args: Any, first: Trace | None, second: Trace | None) -> None:
    """Follow the difference of two values: a value and what its key reads, or a state and what is subtracted from it."""
    y = call.y
    if isinstance(second, ReadTrace) and not isinstance(first, State | ReadTrace):
        product = Product((expand_value(args[0], y),), False, second)
        log.put(y, add_sources(product, call.frame, args[:1], call.traces))
    elif isinstance(first, ReadTrace) and not isinstance(second, State | ReadTrace):
        product = Product((expand_value(args[1], y), expand_value(-1, y)), False, first)
        log.put(y, add_sources(product, call.frame, args[1:], call.traces))
    elif isinstance(second, Product) and isinstance(first, State):
        write_product(log, call.frames, first, multiply_by_number(second, -1, y), y)


def follow_first_sum(log: StateLog, call: FollowedFunction, args: Any, first: Trace | None, second: Trace | None) -> None:
    """Follow the sum of two products, or of one and a number or tensor, as a state of a loop that starts without zeros."""
    frames, y = call.frames, call.y
    products = [one for one in (first, second) if isinstance(one, Product) and one.is_plain]
    other = next((x for x, one in zip(args, (first, second), strict=True) if one is None or isinstance(one, Factors)), None)
    is_sure = all(one.token_factors > 1 for one in products)
    if len(products) == 2 and is_sure:
        last, decayed = sorted(products, key=lambda one: len(one.factors))
        start_from_product(log, frames, decayed, last, y)
    elif len(products) == 1 and is_zero(other):
        write_product(log, frames, log.start(y, StateLoop()), products[0], y)
    elif len(products) == 1 and is_sure and isinstance(other, Tensor) and other.shape == y.shape:
        added = next((x for x in args if other is y and x is not y), None)
        write_product(log, frames, log.start(y, start_loop(frames[-1], other, added)), products[0], y)


def follow_mixture(log: StateLog, call: FollowedFunction, mix: Mixture) -> None:
    """Follow the sum of a state and of a product, or of the next state and the one before, each times a factor, as a state."""
    first, second, y = call.find(mix.one), call.find(mix.other), call.y
    if isinstance(second, State) and not isinstance(first, State):
        mix = Mixture(mix.other, mix.by_other, mix.one, mix.by, mix.gate)
        first, second = second, first
    if isinstance(first, State) and isinstance(second, State):
        one, other = (
            state._replace(decays=(*state.decays, Decay(read_factor(expand_value(by, y), state.dims))))
            for state, by in ((first, mix.by), (second, mix.by_other))
        )
        mix_states(log, one, other, y)
    elif isinstance(first, State) and isinstance(second, Product):
        state = decay_state(log, call.frame, first, mix.by, None, y)
        if state is not None:
            sources = (*second.sources, *list_sources([mix.gate], {}))
            product = second._replace(factors=(*second.factors, expand_value(mix.by_other, y)), sources=sources)
            write_product(log, call.frames, state, product, y)


def mix_states(log: StateLog, first: State, second: State, y: Tensor) -> None:
    """Follow y, the sum of the last state and of the one before, each times factors, as the last state, as a mask has it."""
    new, old = (first, second) if first.places > second.places else (second, first)
    loop, place = new.loop, new.places[0]
    write = loop.writes[place] if not new.time and place == len(loop.writes) - 1 and place >= 0 else None
    is_start = old.places == (START,) and old.loop.initial is loop.initial
    if write is None or write.before != old.places[0] or not (old.loop is loop or is_start) or write.correction is not None:
        return
    if y.shape != loop.shape or new.dims != loop.dims or place in {one for read in loop.reads for one in read.places}:
        return
    kept, scale, decay = (multiply_decays(one, y) for one in (old.decays, new.decays, write.decays))
    dims, decays = loop.dims, (*old.decays, *new.decays, *write.decays)
    total = Decay(
        read_factor((kept + scale * decay).expand(y.shape), dims), (), tuple(x for one in decays for x in one.sources)
    )
    factors = (*write.factors, read_factor(scale.expand(y.shape), dims))
    loop.writes[place], loop.last = write._replace(decays=(total,), factors=factors), weakref.ref(y)
    log.put(y, State(loop, (place,), dims))


def multiply_decays(decays: tuple[Decay, ...], y: Tensor) -> Tensor:
    """Return the product of decays, which broadcasts to y."""
    total = y.new_ones([1] * y.dim())
    for one in decays:
        total = total * one.factor.tensor
    return total


def start_from_product(log: StateLog, frames: list[ModuleFrame], first: Product, second: Product, y: Tensor) -> None:
    """Follow y as the second state of a loop that starts without zeros: what multiplies the first product is a decay."""
    count = len(second.factors)
    written = Product(first.factors[:count], token_factors=second.token_factors, sources=first.sources[:count])
    write_product(log, frames, log.start(y, StateLoop()), written, y)
    state = log.find(y)
    for by in first.factors[count:]:
        state = decay_state(log, frames[-1], state, by, None, y) if isinstance(state, State) else None
    if isinstance(state, State):
        write_product(log, frames, state, second, y)


def decay_state(log: StateLog, frame: ModuleFrame, state: State, by: Any, trace: Trace | None, y: Tensor) -> State | None:
    """Follow y, a state that was multiplied by a value of some trace, or by queries or keys that are summed next."""
    dims = log.table.align(state.dims, y.shape)
    if dims is None or isinstance(trace, ReadTrace):
        return None
    if not state.loop.has_token_weights:
        state.loop.has_token_weights = count_token_factors(frame, [by], {id(by): trace} if trace else {}) > 0
    exponents = trace.factors if isinstance(trace, Product) and trace.is_exponential else ()
    factor, *rest = (read_factor(expand_value(one, y), dims) for one in (by, *exponents))
    sources = list_sources([by], {id(by): trace} if trace else {})
    decayed = state._replace(dims=dims, decays=(*state.decays, Decay(factor, tuple(rest), sources)))
    log.put(y, decayed)
    return decayed


def write_product(log: StateLog, frames: list[ModuleFrame], state: State, product: Product, y: Tensor) -> None:
    """Follow y, the sum of a state and a product, as the next state."""
    loop, correction = state.loop, product.correction
    if state.time or product.is_exponential or (correction is not None and correction.loop is not loop):
        return
    is_first = state.places == (START,)
    if is_first and loop.writes and loop.first_frame is not frames[-1]:  # layers that start from the same zeros
        loop = StateLoop(loop.initial, loop.left, has_token_weights=loop.has_token_weights)
    if not loop.writes:
        fits = log.table.align(state.dims, y.shape) == state.dims
        loop.dims, loop.shape = state.dims if fits else log.table.add_dims(y.shape), y.shape
        log.loops.append(loop)
    elif loop in log.waiting:
        log.waiting.remove(loop)
        log.loops.append(loop)
    is_same = log.table.expand_dims(state.dims) == log.table.expand_dims(loop.dims)
    if y.shape != loop.shape or not (is_same or is_first):
        return
    factors = tuple(read_factor(expand_value(one, y), loop.dims) for one in product.factors)
    place = None if correction is None else correction.place
    written = Write(state.places[0], state.decays if is_same else (), factors, place, product.token_factors, product.sources)
    log.put(y, State(loop, (loop.add_write(frames, written, y),), loop.dims))


def is_zero(x: Any) -> bool:
    """Return whether a value is the number 0."""
    return isinstance(x, int | float) and x == 0


def find_term_traces(first: Trace | None, second: Trace | None) -> tuple[Trace | None, Trace | None]:
    """Return the traces of what is added up, of two states as one state and one product, if one of them was a product."""
    if isinstance(first, State) and isinstance(second, State) and not (first.decays and second.decays):
        return (first, second.product) if second.product is not None and not second.decays else (first.product, second)
    return first, second
