"""What a loop reads from its states: products with queries that sum over the axis of the keys."""

import weakref

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens
from regard.observe.interception.handwritten.ancestors.query_axes import list_axes
from regard.observe.interception.handwritten.products.contraction import find_operands
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, label_product
from regard.observe.interception.handwritten.products.tensor_axes import Dims
from regard.observe.interception.handwritten.recurrences.followed_function import FollowedFunction
from regard.observe.interception.handwritten.recurrences.outer_products import (
    add_sources,
    label_operands,
    multiply_by_number,
    multiply_operands,
    read_factor,
)
from regard.observe.interception.handwritten.recurrences.state_log import StateLog
from regard.observe.interception.handwritten.recurrences.state_loop import (
    Decay,
    Factor,
    Product,
    Read,
    ReadTrace,
    Sources,
    State,
    StateLoop,
)
from regard.observe.interception.handwritten.recurrences.state_writes import decay_state, write_product

SEVERAL = "its states are read by a product of more than two tensors, or one that adds to another tensor"


def follow_contraction(log: StateLog, call: FollowedFunction) -> None:
    """Follow a product that sums over axes: a query that reads a state, or an outer product."""
    operands = find_operands(call.name, call.args, call.kwargs)
    states = [(n, one) for n, x in enumerate(operands) if isinstance(one := call.find(x), State)]
    product = label_product(call.name, operands, call.args, call.kwargs)
    if not states and product is not None and product.sums_several():
        states = start_at_read(log, call, operands)
    if not states:
        follow_outer_product(log, call, operands, product)
        return
    place, state = states[0]
    others = [x for n, x in enumerate(operands) if n != place]
    if product is None or product.added is not None or len(states) > 1:
        if len(states) == 1 and all(has_tokens(call.frame, x) for x in others):
            state.loop.reason = SEVERAL
        return
    dims = product.build_dims(log.table, {place: state.dims})
    query = read_factor(others[0], dims[1 - place])
    is_own = list_axes(log.table, query.dims) <= list_axes(log.table, state.dims)
    is_of_tokens = has_tokens(call.frame, others[0])
    if not is_own and not is_of_tokens:
        return  # a layer that transforms a state reads nothing from it
    state.loop.has_token_weights |= is_of_tokens
    if list_axes(log.table, state.dims) - list_axes(log.table, dims[2]):
        query = query if product.factor == 1 else Factor(query.tensor * product.factor, query.dims)
        read_state(log, state, query, dims[2], call, (weakref.ref(others[0]),))
    elif is_own:
        log.put(call.y, state._replace(dims=dims[2], decays=(*state.decays, Decay(query, (), (weakref.ref(others[0]),)))))


def follow_outer_product(
    log: StateLog, call: FollowedFunction, operands: list[Tensor], product: LabelledProduct | None
) -> None:
    """Follow an outer product, or its sum with a state as baddbmm computes it."""
    added = None if product is None else product.added
    outer = multiply_operands(operands, *label_operands(product, call.core, call.args, operands), call.traces, call.y)
    if outer is None:
        return
    outer = add_sources(outer, call.frame, operands, call.traces)
    if product is None or added is None:
        log.put(call.y, outer)
        return
    before, factor = call.find(added[0]), added[1]
    if isinstance(before, State):
        state = before if factor == 1 else decay_state(log, call.frame, before, factor, None, call.y)
        if state is not None:
            write_product(log, call.frames, state, multiply_by_number(outer, product.factor, call.y), call.y)


def start_at_read(log: StateLog, call: FollowedFunction, operands: list[Tensor]) -> list[tuple[int, State]]:
    """Follow a product that a query reads as the first state of a loop without zeros; return it with its place."""
    products = [(n, one) for n, x in enumerate(operands) if isinstance(one := call.find(x), Product)]
    found = [(n, one) for n, one in products if one.is_plain and one.token_factors > 1]
    others = [x for x in operands if id(x) not in call.traces]
    if len(found) != 1 or not others or not has_tokens(call.frame, others[0]):
        return []
    (place, product), x = found[0], operands[found[0][0]]
    write_product(log, call.frames, log.start(x, StateLoop()), product, x)
    state = log.find(x)
    assert isinstance(state, State)
    state = state._replace(product=product)
    log.put(x, state)
    return [(place, state)]


def follow_sum(log: StateLog, call: FollowedFunction) -> None:
    """Follow the sum of a state that a query was multiplied by."""
    x, dim = call.args[0], call.read_argument("dim", 1)
    state = call.find(x)
    if not isinstance(state, State) or not state.decays or dim is None:
        return
    summed = {n % x.dim() for n in ([dim] if isinstance(dim, int) else dim)}
    keeps = call.read_argument("keepdim", 2, False)
    dims = tuple(() if n in summed else axes for n, axes in enumerate(state.dims) if keeps or n not in summed)
    *decays, last = state.decays
    if list_axes(log.table, last.factor.dims) - list_axes(log.table, dims):
        read_state(log, state._replace(decays=tuple(decays)), last.factor, dims, call, last.sources)


def read_state(log: StateLog, state: State, query: Factor, dims: Dims, call: FollowedFunction, sources: Sources) -> None:
    """Follow what a query reads from states; a copy is kept, since it may be written into."""
    y, function = call.y, "mul and sum" if call.core == "sum" else call.core
    output = Factor(y.detach().clone(), dims)
    state.loop.reads.append(Read(state.places, state.time, state.decays, query, output, function, weakref.ref(y), sources))
    log.put(y, ReadTrace(state.loop, len(state.loop.reads) - 1, log.outputs.start(state.loop, y)))
