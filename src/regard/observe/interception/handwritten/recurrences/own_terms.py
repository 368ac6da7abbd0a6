"""What tokens add to what they read of the states before them, as chunks of a single token do, and write of what they read."""

from collections.abc import Iterable

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef, find_ancestors
from regard.observe.interception.handwritten.recurrences.loop_check import ROUNDINGS
from regard.observe.interception.handwritten.recurrences.state_loop import Read, StateLoop
from regard.observe.interception.provenance import ModuleFrame

SCALED = "what its tokens read of the states before them is multiplied before they add terms of the same queries"
WRITES_READ = "what it writes or decays by was made of its states, otherwise than a delta rule corrects its values"


def adds_to_scaled(frame: ModuleFrame, read: Read) -> bool:
    """Return whether something that was made of the query of a read was added to a product of what was read."""
    queries, scaled = {*map(id, read.sources)}, set[int]()
    for one in frame.list_operations():
        role, own = infer_role(one.name), [x for x in one.given if id(x) in scaled]
        if role is Role.MULTIPLY and (own or any(x is read.made for x in one.given)):
            scaled |= {*map(id, one.results)}
        elif role is Role.ADD and own:
            others = [x for x in one.given if id(x) not in scaled]
            if any(not queries.isdisjoint(find_ancestors([frame], x)) for x in others):
                return True
    return False


def are_made_of_states(frame: ModuleFrame, loop: StateLoop, tensors: Iterable[TensorRef]) -> bool:
    """Return whether a tensor was made in a module of a state of a loop, or of what was read from one."""
    states, waiting, seen = {*map(id, loop.made), *(id(one.made) for one in loop.reads)}, [*tensors], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in states:
            return True
        if id(one) not in seen:
            seen.add(id(one))
            waiting += [x for maker in frame.find_makers(one) for x in maker.given]
    return False


def read_own_values(outputs: Tensor, total: Tensor, values: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return what multiplies each value (b, h, t, e) to be added to the outputs, with its rounding, and the outputs with it.

    So chunks of one token add q_i · k_i v_i to what they read from the state of earlier ones. None, and the outputs as they
    are, if something else was added.
    """
    v, added = values.double(), total.double() - outputs.double()
    norm = v.square().sum(3).clamp(min=torch.finfo(torch.float64).tiny)
    skip, size = (added * v).sum(3) / norm, total.double().abs() + outputs.double().abs()
    eps = max(torch.finfo(one.dtype).eps for one in (outputs, values))
    if not bool(((added - skip.unsqueeze(3) * v).abs() <= ROUNDINGS * eps * size).all()):
        return None, None, outputs
    return skip, skip.abs() + (size * v.abs()).sum(3) / norm, total
