"""Scans over tokens in rounds that no map was read from: each round joins states (a, h) and (b, g) to (a b, b h + g).

Both are parts of the same tensors, as those of odd and of even tokens, or of tokens some way apart
(https://doi.org/10.1145/7902.7903).
"""

from collections import Counter
from typing import NamedTuple

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.products.score_form import PERMUTES, PRODUCTS, VIEWS
from regard.observe.interception.handwritten.softmax.pair_loops import ENTRY_PICKS, LISTS
from regard.observe.interception.handwritten.unread.unread_loops import MOVES, LoopKind, TokenAxis
from regard.observe.interception.provenance import LEARNED, TOKEN, WEIGHT, ModuleFrame, Operation

MAX_OPERATIONS = 1_000  # of a module, more of which are a loop over tokens
MIN_PRODUCTS = 3  # of two rounds, the last of which need not multiply decays
KINDS = {TOKEN: LoopKind.TOKENS, WEIGHT: LoopKind.WEIGHTS, LEARNED: LoopKind.WEIGHTS}  # by what decays hold
MULTIPLIES = {"__mul__", "__rmul__", "__imul__", "mul", "mul_", "multiply", "multiply_", "addcmul", "addcmul_"}
MOVED = MOVES | LISTS | {"roll"}
VIEWED = VIEWS | PERMUTES | ENTRY_PICKS


class Chain(NamedTuple):
    """The first tensor that a tensor is a part of, by its id, and the number of rounds that have changed it since."""

    origin: int
    rounds: int


def multiplies_parts(operations: list[Operation]) -> bool:
    """Return whether two different parts of one tensor are multiplied, as decays in each round: quick."""
    products = [one for one in operations if one.name in MULTIPLIES] if len(operations) <= MAX_OPERATIONS else []
    if len(products) < MIN_PRODUCTS or not any(len(one.given) == 2 and one.sizes[0] == one.sizes[1] for one in products):
        return False
    whole: dict[int, int] = {}
    for operation in operations:
        core, given = strip_affixes(operation.name), operation.given
        if core in MOVED and given:
            first = next((id(x) for x in given if id(x) in whole), id(given[-1 if core in LISTS else 0]))
            whole |= {id(y): whole.get(first, first) for y in operation.results if id(y) != first}
        elif core in PRODUCTS and len(given) == 2 and given[0] is not given[1]:
            one, other = map(id, given)
            if whole.get(one, one) == whole.get(other, other):
                return True
    return False


def find_rounds(frame: ModuleFrame, operations: list[Operation], tokens: TokenAxis) -> LoopKind | None:
    """Return what makes the decays of operations that join the states of all tokens in rounds; None if they do not."""
    rounds = Rounds(frame, tokens.size.bit_length() - 1)
    found = (rounds.follow(one) for one in operations) if len(operations) <= MAX_OPERATIONS else ()
    return next((kind for kind in found if kind is not None), None)


class Rounds:
    """The states and the decays of the rounds of a module, by the tensors that they are parts of."""

    def __init__(self, frame: ModuleFrame, least: int) -> None:
        self.frame, self.least = frame, least  # rounds of a scan
        self.wholes: dict[int, int] = {}  # the tensor that a view is of, by their ids
        self.chains: dict[int, Chain] = {}  # by the id of a tensor that is no view
        self.origins: dict[int, TensorRef] = {}
        self.products: dict[int, list[tuple[TensorRef, Chain, Chain]]] = {}  # states, their chain and that of decays
        self.decays = set[int]()  # origins of which parts were multiplied with each other
        self.first: dict[int, int] = {}  # the entries of the states that the first sum made, by their origin
        self.added = Counter[int]()  # of all sums
        self.most = Counter[int]()  # rounds

    def find(self, x: TensorRef) -> Chain | None:
        """Return the chain of a tensor; None if it has none."""
        return self.chains.get(self.wholes.get(id(x), id(x)))

    def find_both(self, one: TensorRef, other: TensorRef, sizes: list[int]) -> tuple[Chain | None, Chain | None]:
        """Return the chains of two tensors; one without any begins one if the other of its size has one.

        So it is with decays that multiply states before they are moved themselves.
        """
        for x, y in ((one, other), (other, one)):
            if sizes[0] == sizes[1] and self.find(x) is None and self.find(y) is not None:
                self.origins[id(x)] = x
                self.chains[id(x)] = Chain(id(x), 0)
        return self.find(one), self.find(other)

    def put(self, operation: Operation, chain: Chain) -> None:
        """Set the chain of the results of an operation, and of all views of a tensor that it wrote into."""
        self.chains |= {self.wholes.get(id(y), id(y)): chain for y in operation.results}

    def follow(self, operation: Operation) -> LoopKind | None:
        """Follow an operation; return what makes the decays of the scan that it completes, None if it completes none."""
        core, given = strip_affixes(operation.name), operation.given
        if operation.child is not None or not given:
            return None
        if core in MOVED:
            self.follow_move(operation, core)
        elif core in PRODUCTS and len(given) == 2:
            self.follow_product(operation)
        elif core == "addcmul" and len(given) == 3:
            self.multiply(given[1], given[2], operation)
            return self.follow_sum(operation, given[0], operation.results[0])
        elif infer_role(core) is Role.ADD and len(given) == 2:
            return self.follow_sum(operation, *given) or self.follow_sum(operation, *given[::-1])
        return None

    def follow_move(self, operation: Operation, core: str) -> None:
        """Follow a function that takes parts of a tensor, changes its layout or joins tensors."""
        given = operation.given
        known = [chain for x in given if (chain := self.find(x)) is not None]
        if not known:
            self.origins[id(given[0])] = given[0]
            known = [self.chains.setdefault(id(given[0]), Chain(id(given[0]), 0))]
        first = id(given[0])
        if core in VIEWED and all(id(y) != first for y in operation.results):
            self.wholes |= {id(y): self.wholes.get(first, first) for y in operation.results}
        else:
            self.put(operation, max(known, key=lambda chain: chain.rounds))

    def follow_product(self, operation: Operation) -> None:
        """Follow a product of two parts of decays as the decays of the next round, or of decays and states."""
        one, other = operation.given
        ours, theirs = self.find_both(one, other, operation.sizes)
        if ours is None or theirs is None:
            return
        if ours.origin != theirs.origin:
            self.multiply(one, other, operation)
        elif one is not other:
            self.decays.add(ours.origin)
            self.put(operation, Chain(ours.origin, min(ours.rounds, theirs.rounds) + 1))

    def multiply(self, one: TensorRef, other: TensorRef, operation: Operation) -> None:
        """Keep the product of decays and states, in either order."""
        ours, theirs = self.find_both(one, other, operation.sizes[-2:])
        if ours is not None and theirs is not None:
            both = [(one, ours, theirs), (other, theirs, ours)]
            self.products |= {id(y): both for y in operation.results}

    def follow_sum(self, operation: Operation, x: TensorRef, product: TensorRef) -> LoopKind | None:
        """Follow the sum of states x and of a product as the states of the next round; return the kind of a scan, if it is one.

        A tree of sums that leaves a single state adds up half as many entries in each round.
        """
        own = self.find(x)
        for state, before, decay in self.products.get(id(product), []) if own is not None else []:
            if own is None or own.origin != before.origin or before.origin == decay.origin or state is x:
                continue
            origin, entries = own.origin, max(operation.sizes)
            rounds = min(own.rounds, before.rounds, decay.rounds) + 1
            self.put(operation, Chain(origin, rounds))
            self.first.setdefault(origin, entries)
            self.added[origin] += entries
            self.most[origin] = max(self.most[origin], rounds)
            is_scan = self.most[origin] >= self.least and self.added[origin] > 2 * self.first[origin]
            if is_scan and decay.origin in self.decays:
                ours, theirs = (self.frame.find_contents(self.origins[one]) for one in (origin, decay.origin))
                return KINDS.get(theirs) if ours == TOKEN else None
        return None
