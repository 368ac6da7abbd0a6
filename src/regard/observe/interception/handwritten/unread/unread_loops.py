"""Loops over tokens that no map was read from: a state is multiplied by a decay and added to, token after token.

They are found in the operations of a module when it ends. Each step multiplies by a decay, and adds something, that were made
of the token that it picked and of no state: recurrent networks whose gates read their state are none of these.
"""

from collections import Counter
from enum import Enum, auto
from functools import cache
from math import prod
from typing import NamedTuple

from torch import nn

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import REPEATS, TensorRef
from regard.observe.interception.handwritten.products.score_form import COPIES, PERMUTES, VIEWS
from regard.observe.interception.handwritten.softmax.pair_loops import ENTRY_PICKS, LISTS
from regard.observe.interception.provenance import LEARNED, TOKEN, WEIGHT, ModuleFrame, Operation

MAX_LOOPS = 8  # to look at, of those with the most steps
MAX_PICKED = 8  # tokens to keep of those that a tensor was made of, the last ones
FUSED = {"addcmul", "baddbmm", "addmm", "addbmm"}  # add a product of two tensors to a third
LAYERS = {f"torch.nn.modules.{name}" for name in ("linear", "activation", "normalization", "dropout")}  # that keep no state
FILLS_OR_FLIPS = {"where", "masked_fill", "setitem", "copy", "tril", "triu", "pad", "flip"}
MOVES = VIEWS | PERMUTES | COPIES | ENTRY_PICKS | REPEATS | FILLS_OR_FLIPS


class TokenAxis(NamedTuple):
    """The axis of the tokens in an input of a module, (b, t, c) or (t, b, c), and how many there are."""

    axis: int
    size: int


class LoopKind(Enum):
    """What makes the decays of a loop."""

    TOKENS = auto()
    WEIGHTS = auto()


class LoopState(NamedTuple):
    """A tensor as the state after some steps of a loop, times factors and plus terms since the last step."""

    number: int  # of steps
    factors: tuple[TensorRef, ...] = ()
    terms: tuple[TensorRef, ...] = ()
    added: tuple[TensorRef, ...] = ()  # by the last step
    before: "LoopState | None" = None  # what the last step added to
    tensor: TensorRef | None = None  # the state after the last step
    place: int = -1  # of the last step among the operations


@cache
def is_step(name: str) -> bool:
    """Return whether the function of this name may add to the state of a loop. Cached per name."""
    return infer_role(name) is Role.ADD or strip_affixes(name) in FUSED | {"lerp"}


def find_loop(frame: ModuleFrame, operations: list[Operation], tokens: TokenAxis) -> LoopKind | None:
    """Return what decays a state has that operations add to, for each token, and of which they join what they read; or None."""
    if not has_parts(operations, tokens):
        return None
    states: dict[int, LoopState] = {}  # by the id of the tensor
    continued = set[tuple[int, int]]()  # states that a step followed, by tensor and number
    for place, operation in enumerate(operations):
        state = None if operation.child else follow_state(operation, states)
        for y in operation.results:
            states.pop(id(y), None)
            if state is not None:
                states[id(y)] = state._replace(tensor=y, place=place) if state.tensor is None else state
        if state is not None and state.before is not None:
            continued.add((id(state.before.tensor), state.before.number))
    last = {
        key: state
        for state in states.values()
        if state.number >= tokens.size - 1 and (key := (id(state.tensor), state.number)) not in continued
    }
    most = sorted(last.values(), key=lambda state: state.number, reverse=True)
    kinds = (find_kind(frame, operations, state, tokens) for state in most[:MAX_LOOPS])
    return next((kind for kind in kinds if kind is not None), None)


def has_parts(operations: list[Operation], tokens: TokenAxis) -> bool:
    """Return whether there are enough steps, picks and joined tensors for a loop over these tokens: quick."""
    steps = sum(is_step(one.name) for one in operations)
    picked = sum(len(one.results) for one in operations if picks_tokens(one, tokens))
    writes = Counter(id(one.given[0]) for one in operations if one.name == "__setitem__" and one.given)
    joined = max((len(one.given) for one in operations if one.name in LISTS), default=0)
    return min(steps, picked, max(joined, *writes.values(), 0)) >= tokens.size - 1


def picks_tokens(operation: Operation, tokens: TokenAxis) -> bool:
    """Return whether an operation picks single tokens, each a vector or a matrix of features."""
    if strip_affixes(operation.name) not in ENTRY_PICKS:
        return False
    return runs_along_tokens(operation, tokens) or cuts_tokens(operation, tokens)


def cuts_tokens(operation: Operation, tokens: TokenAxis) -> bool:
    """Return whether an operation picks single tokens otherwise: by a slice, a part, a tensor, or of tokens that are first."""
    lookup, parts = operation.lookup, operation.layout if operation.name == "chunk" else None
    if lookup is not None:
        rows = lookup.read_index() if lookup.size == tokens.size and lookup.dim not in (None, -1) else None
        return rows is not None and rows.shape[-1] == 1
    if operation.along is not None:
        axis, shape = operation.along
        return axis == 0 and len(shape) > 2 and shape[0] == tokens.size and prod(shape[1:]) > 1
    if operation.shapes is not None:
        before, after = operation.shapes.given[0], operation.shapes.result
    elif parts is not None and len(operation.results) == tokens.size:
        before, after = parts[:2]
    else:
        return False
    cut = [axis for axis, sizes in enumerate(zip(before, after, strict=False)) if sizes[0] != sizes[1]]
    if len(before) != len(after) or len(before) < 3 or len(cut) != 1:
        return False
    (axis,) = cut
    return before[axis] == tokens.size and after[axis] == 1 and axis < len(before) - 1 and prod(before[axis + 1 :]) > 1


def picks_numbers(operation: Operation, tokens: TokenAxis) -> bool:
    """Return whether an operation picks single numbers of tokens, in rows of a batch: of (b, t) or (b, t, 1)."""
    if operation.along is None or strip_affixes(operation.name) not in ENTRY_PICKS:
        return False
    axis, shape = operation.along
    return axis == tokens.axis and shape[axis] == tokens.size and (len(shape) == 2 or shape[2:] == (1,))


def runs_along_tokens(operation: Operation, tokens: TokenAxis) -> bool:
    """Return whether an operation picks or sums up along the axis of tokens that have features, in rows of a batch."""
    if operation.along is None:
        return False
    axis, shape = operation.along
    is_axis = not axis if tokens.axis == 0 else 0 < axis < len(shape) - 1
    return len(shape) > 2 and is_axis and shape[axis] == tokens.size and prod(shape[axis + 1 :]) > 1


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
    if state.before is not None and any(other.tensor is state.before.tensor for one, other in known if one is not x):
        return state._replace(factors=(), tensor=None)  # the state and the one before, mixed by a mask
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


def may_keep_state(kind: type[nn.Module] | None) -> bool:
    """Return whether modules of a class, if it is one, may read more than their arguments: all but layers of torch."""
    return kind is not None and kind.__module__ not in LAYERS


class PickedTokens:
    """The tokens that tensors were made of, by when they were picked: the last ones."""

    def __init__(self, frame: ModuleFrame, tokens: TokenAxis) -> None:
        self.frame, self.tokens = frame, tokens
        self.picked: dict[int, tuple[int, ...]] = {}  # by the id of a tensor
        self.numbers: dict[int, tuple[int, ...]] = {}  # of tensors that were made of one number of each token
        self.bounded = set[int]()  # by a nonlinear function

    def follow(self, operation: Operation, place: int) -> None:
        """Follow the operation at a place to its results."""
        results, given = [*map(id, operation.results)], [*map(id, operation.given)]
        for pick, found in ((picks_tokens, self.picked), (picks_numbers, self.numbers)):
            if pick(operation, self.tokens) and self.frame.find_contents(operation.given[0]) == TOKEN:
                found.update((y, (place * self.tokens.size + n,)) for n, y in enumerate(results))
                break
            if sources := {n for x in given for n in found.get(x, ())}:
                found.update(dict.fromkeys(results, (*sorted(sources)[-MAX_PICKED:],)))
                break
        if infer_role(operation.name) in (Role.NONLINEAR, Role.SOFTMAX) or not self.bounded.isdisjoint(given):
            self.bounded.update(results)

    def find_last(self, tensors: tuple[TensorRef, ...]) -> int:
        """Return the last token with features that some tensors were made of; -1 if they were made of none."""
        return max((n for x in tensors for n in self.picked.get(id(x), ())), default=-1)

    def find_last_decay(self, tensors: tuple[TensorRef, ...]) -> int:
        """Return the last token that some factors were made of, as gates or as decays; -1 if they were made of none.

        A number of each token is one if a nonlinear function bounds it: a flag that ends an episode of rewards is not.
        """
        numbers = (n for x in tensors if id(x) in self.bounded for n in self.numbers.get(id(x), ()))
        return max(self.find_last(tensors), *numbers, -1)


def find_kind(frame: ModuleFrame, operations: list[Operation], last: LoopState, tokens: TokenAxis) -> LoopKind | None:
    """Return the decays of a loop of which each step has a term of the token that it picked, and none of a state; else None.

    Something made of each state is joined. A module that the loop calls may read a state: those are not seen in a tuple.
    """
    steps: dict[int, LoopState] = {}
    while last.before is not None:
        steps[last.place], last = last, last.before
    made = set[int]()  # of a state
    picked = PickedTokens(frame, tokens)
    decays, added, writes, joined, constant = set[int](), set[int](), Counter[int](), 0, 0
    for place, operation in enumerate(operations):
        given, step = [*map(id, operation.given)], steps.get(place)
        if step is not None and step.before is not None:
            factors, terms = step.before.factors, step.added
            if not made.isdisjoint(map(id, (*factors, *terms))):
                return None
            are_weights = [frame.find_contents(x) in (WEIGHT, LEARNED) for x in factors]
            is_constant = any if step.number == 1 else all  # the first may be of the first token
            constant += bool(factors) and is_constant(are_weights)
            decays.add(picked.find_last_decay(factors))
            added.add(picked.find_last(terms))
        read = [x for x in given if x in made]
        if operation.name in LISTS:
            joined = max(joined, len({*read}))
        elif operation.name == "__setitem__" and given[-1] in made:
            writes[given[0]] += 1
        if step is not None or read or (made and may_keep_state(operation.child)):
            made |= {*map(id, operation.results)}
        else:
            picked.follow(operation, place)
    if min(len(added - {-1}), max(joined, *writes.values(), 0)) < tokens.size - 1:
        return None
    if len(decays - {-1}) >= tokens.size - 1:
        return LoopKind.TOKENS
    return LoopKind.WEIGHTS if constant >= tokens.size - 1 else None
