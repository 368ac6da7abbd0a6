"""Followed products and states in other layouts: functions that view, copy, cut or join them, or write them into a tensor."""

import weakref
from typing import Any

from torch import Tensor

from regard.observe.interception.handwritten.products.score_form import (
    COPIES,
    PERMUTES,
    SLICES,
    VIEWS,
    follow_dims,
    is_view_index,
)
from regard.observe.interception.handwritten.recurrences.followed_function import FollowedFunction
from regard.observe.interception.handwritten.recurrences.outer_products import can_view
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
from regard.observe.interception.handwritten.recurrences.state_loop import (
    START,
    Product,
    ReadTrace,
    State,
    StateLoop,
    Trace,
)
from regard.observe.interception.provenance import is_in_place

LAYOUTS = VIEWS | PERMUTES | COPIES | SLICES | {"expand", "expand_as", "broadcast_to"}
RESHAPES = VIEWS - {"squeeze", "unsqueeze"}


def follow_layout(log: StateLog, call: FollowedFunction) -> None:
    """Follow a function that changes a layout or takes parts of what is followed."""
    trace = call.find(call.args[0]) if call.args else None
    if trace is None or is_in_place(call.name):
        return
    x, results = call.args[0], [call.y] if isinstance(call.y, Tensor) else list(call.y)
    is_whole = len(results) == 1 and results[0].numel() == x.numel()
    if isinstance(trace, ReadTrace):
        if is_whole:
            is_same = call.core in COPIES or trace.order is None
            order = trace.order if is_same else call.func(trace.order, *call.args[1:], **call.kwargs)
            log.put(results[0], trace._replace(order=order))
    elif call.core in COPIES:
        if is_whole:
            log.put(results[0], detach_state(trace) if call.core == "detach" and isinstance(trace, State) else trace)
    elif isinstance(trace, State):
        given = call.name, call.func, call.args, call.kwargs, x, results[0]
        dims = follow_dims(log.table, trace.dims, *given) if is_whole else None
        if dims is not None:
            log.put(results[0], trace._replace(dims=dims))
    elif isinstance(trace, Product):
        follow_factors(log, call, trace, results)


def detach_state(state: State) -> State:
    """Return a state without gradients: its loop starts from one, or is cut between two tokens."""
    loop = state.loop
    loop.is_cut |= state.places != (START,)
    if loop.writes or loop.initial is None or not loop.initial.requires_grad:
        return state
    return state._replace(loop=StateLoop(loop.initial.detach(), loop.left, has_token_weights=loop.has_token_weights))


def follow_factors(log: StateLog, call: FollowedFunction, product: Product, results: list[Tensor]) -> None:
    """Follow a function of a layout that is applied to each factor of a product."""
    parts: list[list[Tensor]] = []
    for one in product.factors:
        if call.core in RESHAPES and not can_view(one, results[0]):
            return  # to copy what is expanded takes as much memory as the product
        part = one.view(results[0].shape) if call.core in RESHAPES else call.func(one, *call.args[1:], **call.kwargs)
        parts.append([part] if isinstance(part, Tensor) else part)
    for y, factors in zip(results, zip(*parts, strict=True), strict=True):
        sources = product.sources if y.numel() == call.args[0].numel() else (weakref.ref(y),)
        log.put(y, product._replace(factors=factors, sources=sources))


def follow_written(log: StateLog, args: Any, trace: Trace | None) -> None:
    """Follow a tensor that a state is written into as a whole, as a buffer that holds the state."""
    x, y = args[0], args[-1]
    is_whole = len(args) == 2 or is_view_index(args[1])
    if isinstance(trace, State) and is_whole and x.shape == y.shape:
        log.put(x, trace)
        trace.loop.last = weakref.ref(x)


def follow_joined(log: StateLog, core: str, args: Any, kwargs: Any, y: Any) -> None:
    """Follow the states of a loop that a function joins along a new axis."""
    entries = args[0] if args and isinstance(args[0], list | tuple) else ()
    states = [trace for x in entries if isinstance(trace := log.find(x), State)]
    if not states or len(states) < len(entries) or not isinstance(y, Tensor):
        return
    first, dim = states[0], kwargs.get("dim", args[1] if len(args) > 1 else 0) % y.dim()
    if any(one.loop is not first.loop or one.dims != first.dims or one.decays or one.time for one in states):
        return
    if core != "stack" and entries[0].shape[dim] != 1:
        return
    time = log.table.add_axis(len(states))
    dims = (*first.dims[:dim], time, *first.dims[dim + (core != "stack") :])
    log.put(y, State(first.loop, tuple(one.places[0] for one in states), dims, time=time))
