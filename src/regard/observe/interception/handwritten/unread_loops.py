"""Loops over tokens that no map was read from: a state is multiplied by a decay and added to, token after token.

They are found in the operations of a module when it ends. Decays and what is added depend on tokens, and on no state: recurrent
networks whose gates read their state are none of these.
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestor_search import REPEATS, TensorRef, walk_back
from regard.observe.interception.handwritten.pair_loops import PICKS
from regard.observe.interception.handwritten.score_form import COPIES, PERMUTES, VIEWS
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation

MIN_STEPS = 4  # of a loop
MAX_LOOPS = 8  # to look at, of those with the most steps
FUSED = {"addcmul", "baddbmm", "addmm", "addbmm"}  # add a product of two tensors to a third
MOVES = VIEWS | PERMUTES | COPIES | PICKS | REPEATS | {"where", "masked_fill", "setitem", "copy", "tril", "triu", "pad", "flip"}


class LoopState(NamedTuple):
    """A tensor as the state after some steps of a loop, times factors and plus terms since the last step."""

    number: int  # of steps
    factors: tuple[TensorRef, ...] = ()
    terms: tuple[TensorRef, ...] = ()
    added: tuple[TensorRef, ...] = ()  # by the last step
    before: "LoopState | None" = None  # what the last step added to
    tensor: TensorRef | None = None  # the state after the last step


@cache
def is_step(name: str) -> bool:
    """Return whether the function of this name may add to the state of a loop. Cached per name."""
    return infer_role(name) is Role.ADD or strip_affixes(name) in FUSED | {"lerp"}


@cache
def is_pick(name: str) -> bool:
    """Return whether the function of this name picks a token. Cached per name."""
    return strip_affixes(name) in PICKS


def computes_loop(frame: ModuleFrame, operations: list[Operation]) -> bool:
    """Return whether operations multiply a state by decays and add to it, with tokens that a loop picks one after the other."""
    states: dict[int, LoopState] = {}  # by the id of the tensor
    continued = set[tuple[int, int]]()  # states that a step followed, by tensor and number
    for operation in operations:
        state = None if operation.child else follow_state(operation, states)
        for y in operation.results:
            states.pop(id(y), None)
            if state is not None:
                states[id(y)] = state._replace(tensor=y) if state.tensor is None else state
        if state is not None and state.before is not None:
            continued.add((id(state.before.tensor), state.before.number))
    last = {
        key: state
        for state in states.values()
        if state.number >= MIN_STEPS and (key := (id(state.tensor), state.number)) not in continued
    }
    most = sorted(last.values(), key=lambda state: state.number, reverse=True)
    return any(is_loop_over_tokens(frame, state) for state in most[:MAX_LOOPS])


def follow_state(operation: Operation, states: dict[int, LoopState]) -> LoopState | None:
    """Return the state that an operation's result is, from those of its arguments; None if it is none."""
    role, core, given = infer_role(operation.name), strip_affixes(operation.name), operation.given
    known = [(x, state) for x in given if (state := states.get(id(x))) is not None]
    if core in MOVES:
        return max((state for _, state in known), key=lambda state: state.number, default=None)
    if core == "lerp" or core in FUSED:
        return follow_fused(core, given, states)
    if role is Role.MULTIPLY and given:
        x, state = max(known, key=lambda one: one[1].number, default=(None, LoopState(0)))
        others = tuple(one for one in given if one is not x)
        return state._replace(factors=(*state.factors, *others)) if known or len(others) > 1 else None
    if role is not Role.ADD or not known:
        return None
    x, state = max(known, key=lambda one: (one[1].number, bool(one[1].factors)))
    same = {id(one) for one, other in known if other.number == state.number > 0}  # the state itself, as in h + z (x - h)
    terms = tuple(one for one in given if one is not x and id(one) not in same)
    if not state.factors:
        return state._replace(terms=(*state.terms, *terms))
    return LoopState(state.number + 1, added=(*state.terms, *terms), before=state)


def follow_fused(core: str, given: list[TensorRef], states: dict[int, LoopState]) -> LoopState | None:
    """Return the state that torch.lerp, or a function that adds a product to a tensor, makes of its arguments."""
    if len(given) < 3:
        return None
    found = [(x, states.get(id(x), LoopState(0))) for x in given[: 2 if core == "lerp" else 3]]
    x, state = max(found, key=lambda one: (one[1].number, bool(one[1].factors)))
    others = tuple(one for one in given if one is not x)
    if core != "lerp" and x is given[0] and state.number and not state.factors:
        return state._replace(terms=(*state.terms, *others))
    before = state if state.factors else state._replace(factors=others)
    return LoopState(state.number + 1, added=(*state.terms, *others), before=before)


def is_loop_over_tokens(frame: ModuleFrame, last: LoopState) -> bool:
    """Return whether the steps of a loop multiply and add tokens that were picked one after the other, and read no state."""
    steps: list[tuple[TensorRef | None, tuple[TensorRef, ...], tuple[TensorRef, ...]]] = []
    state = last
    while state.before is not None and len(steps) < MIN_STEPS - 1:  # the first one may have started the loop
        steps.append((state.tensor, state.before.factors, state.added))
        state = state.before
    for _, factors, added in steps:
        if not all(any(frame.find_contents(x) == TOKEN for x in part) for part in (factors, added)):
            return False
    picked = [find_picked(frame, (*factors, *added)) for _, factors, added in steps]
    sources = set.intersection(*({*one} for one in picked))
    if not any(len({frozenset(one[source]) for one in picked}) == len(picked) for source in sources):
        return False
    inputs = (*steps[0][1], *steps[0][2])
    return find_all_ancestors(frame, inputs).isdisjoint(id(tensor) for tensor, *_ in steps[1:])


def find_picked(frame: ModuleFrame, tensors: Iterable[TensorRef]) -> dict[int, set[int]]:
    """Return the ids of the picked tensors that some tensors were made of, by the id of what they were picked from."""
    found: dict[int, set[int]] = {}
    for x in tensors:
        for _, (one, _), makers in walk_back([frame], (x, 0), lambda *_: True):
            for maker in makers:
                if maker.child is None and is_pick(maker.name):
                    found.setdefault(id(maker.given[0]), set()).add(id(one))
    return found


def find_all_ancestors(frame: ModuleFrame, tensors: Iterable[TensorRef]) -> set[int]:
    """Return the ids of all tensors that some tensors were made from in a module."""
    return {id(one) for x in tensors for _, (one, _), _ in walk_back([frame], (x, 0), lambda *_: True)}
