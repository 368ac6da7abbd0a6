"""Loops over tokens whose state is a matrix that no map was read from: products of keys with values are added to it.

They are found in the operations of a module when it ends. Unlike in unread_loops.py, decays and what is added may read the
state, as those of delta rules and of memories that a gradient trains do.
"""

import sys
from typing import NamedTuple

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.recurrences.outer_products import OUTER
from regard.observe.interception.handwritten.softmax.pair_loops import LISTS
from regard.observe.interception.handwritten.unread.unread_loops import FUSED, MOVES, PickedTokens, TokenAxis, has_parts
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation


class Writes(NamedTuple):
    """The number of tokens that were written to the states that a tensor was made of, and the last of them."""

    tokens: int = 0
    last: int = -1


class OuterProduct(NamedTuple):
    """A product of tensors as an outer product, if it has more entries than each of them, and the last token in it."""

    size: int  # of the largest factor
    token: int


def writes_to_memory(frame: ModuleFrame, operations: list[Operation], tokens: TokenAxis) -> bool:
    """Return whether operations add an outer product of each token to a state, and join what they read of each state."""
    if not has_parts(operations, tokens):
        return False
    memory = Memory(PickedTokens(frame, tokens))
    for place, operation in enumerate(operations):
        memory.follow(operation, place)
    return max(map(len, memory.joined.values()), default=0) >= tokens.size - 1


class Memory:
    """The states of a module's loop and what was made of them, by the ids of tensors."""

    def __init__(self, picked: PickedTokens) -> None:
        self.picked = picked
        self.products: dict[int, OuterProduct] = {}
        self.writes: dict[int, Writes] = {}
        self.joined: dict[int, set[int]] = {}  # the counts of the writes to what was read, by what it was joined in
        self.size = 0  # of the states

    def follow(self, operation: Operation, place: int) -> None:
        """Follow the operation at a place to its results."""
        role, core, given = infer_role(operation.name), strip_affixes(operation.name), operation.given
        sized = [*zip(given, operation.sizes, strict=False)]
        self.picked.follow(operation, place)
        writes = max((self.writes.get(id(x), Writes()) for x in given), default=Writes())
        product = None
        if core in FUSED:
            if len(sized) > 2 and (added := self.find_product(sized[1:3])).size < sized[0][1]:
                writes = self.write(added.token, sized[0][1], writes, given[:1])
        elif role in (Role.MULTIPLY, Role.PRODUCT) or core in OUTER:
            product = self.find_product(sized)
        elif role is Role.ADD or core in MOVES or core == "neg":
            outer = [(found, x, size) for x, size in sized if (found := self.find_outer(x, size)) is not None]
            product = max(found for found, *_ in outer) if len(outer) == len(given) > 0 else None
            if role is Role.ADD and outer:
                found, x, size = max(outer, key=lambda one: one[0].token)
                writes = self.write(found.token, size, writes, [one for one in given if one is not x])
        elif role in (Role.NONLINEAR, Role.SOFTMAX) and 0 < self.size <= max(operation.sizes, default=0):
            writes = Writes()  # a state that is squashed is no sum over tokens
        for y in operation.results:
            self.products.pop(id(y), None)
            if product is not None:
                self.products[id(y)] = product
            if writes.tokens:
                self.writes[id(y)] = writes
        self.join(operation, sized)

    def find_outer(self, x: TensorRef, size: int) -> OuterProduct | None:
        """Return the outer product that a tensor of some size is; None if it is none."""
        found = self.products.get(id(x))
        return found if found is not None and found.size < size else None

    def find_product(self, sized: list[tuple[TensorRef, int]]) -> OuterProduct:
        """Return the product of some tensors, which is no outer product if fewer than two are of tokens.

        An outer product stays one if it is multiplied by smaller ones.
        """
        found = [self.find_outer(x, size) for x, size in sized]
        size = max((size if one is None else one.size for one, (_, size) in zip(found, sized, strict=True)), default=0)
        of_tokens = sum(self.picked.frame.find_contents(x) == TOKEN for x, _ in sized)
        if of_tokens < 2 and not any(found):
            size = sys.maxsize
        return OuterProduct(size, self.picked.find_last(tuple(x for x, _ in sized)))

    def write(self, token: int, size: int, writes: Writes, others: list[TensorRef]) -> Writes:
        """Return the writes to the sum of an outer product of a token and others, one of which has to be the last state."""
        counts = [self.writes.get(id(x), Writes()).tokens for x in others]
        if token <= writes.last or writes.tokens not in counts:
            return writes
        self.size = size
        return Writes(writes.tokens + 1, token)

    def join(self, operation: Operation, sized: list[tuple[TensorRef, int]]) -> None:
        """Keep what a function joins that was made of states and has fewer entries than these."""
        if operation.name in LISTS:
            key, entries = id(operation), sized
        elif operation.name == "__setitem__" and sized:
            key, entries = id(sized[0][0]), sized[-1:]
        else:
            return
        counts = {found.tokens for x, size in entries if (found := self.writes.get(id(x))) is not None and size < self.size}
        self.joined.setdefault(key, set()).update(counts)
