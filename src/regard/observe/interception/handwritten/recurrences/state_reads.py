"""What a loop reads from its states: products with queries that sum over the axis of the keys."""

import weakref
from typing import Any

from torch import Tensor

from regard.observe.interception.handwritten.ancestors.ancestor_search import has_tokens
from regard.observe.interception.handwritten.ancestors.query_axes import list_axes
from regard.observe.interception.handwritten.products.contraction import find_operands
from regard.observe.interception.handwritten.products.labelled_product import label_product
from regard.observe.interception.handwritten.products.tensor_axes import Dims
from regard.observe.interception.handwritten.recurrences.outer_products import (
    count_token_factors,
    label_operands,
    multiply_by_number,
    multiply_operands,
    read_factor,
)
from regard.observe.interception.handwritten.recurrences.state_loop import (
    Decay,
    Factor,
    Product,
    Read,
    ReadTrace,
    State,
    StateLoop,
    Trace,
)
from regard.observe.interception.handwritten.recurrences.state_scans import StateScans
from regard.observe.interception.provenance import ModuleFrame

SEVERAL = "its states are read by a product of more than two tensors, or one that adds to another tensor"


class StateReads(StateScans):
    """The states of the loops of one forward, by what products of them with queries read."""

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
