"""Pairs of tokens behind the entries of a tensor: two tensors that were broadcast, multiplied or added entry by entry."""

import weakref

from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import (
    MAX_STEPS,
    ROW_REDUCTIONS,
    VIEWED,
    Sized,
    TensorRef,
    is_end,
    is_expanded,
    is_used_once,
    starts_as_zeros,
    walk_back,
)
from regard.observe.interception.handwritten.products.score_form import COPIES
from regard.observe.interception.operation_details import GATHERS
from regard.observe.interception.provenance import JOINS, LEARNED, TOKEN, ModuleFrame, Operation, TensorOrRef

Pair = tuple[TensorOrRef, TensorOrRef]


def find_pair(frame: ModuleFrame, x: Tensor, summed: int) -> Pair | None:
    """Return two tensors if the entries of x belong to pairs of their tokens, so that a sum over some is a score; else None.

    That is so where the two were broadcast against each other, or were multiplied or subtracted entry by entry and the sum is
    over features, of which each pair has a number that is `summed`; 0 if they are not summed.
    """
    meeting = find_meeting(frame, weakref.ref(x), x.numel())
    if meeting is None:
        return None
    maker, tokens, size = meeting
    if not is_pairing(frame, maker, tokens, size, summed):
        tokens = find_terms(frame, maker) if infer_role(maker.name) is Role.ADD else []
        tokens = [one for one in tokens if frame.find_contents(one[0]) == TOKEN]
        if len({id(one) for one, _ in tokens}) < 2 or not is_pairing(frame, maker, tokens, size, summed):
            return None
    first, second, *_ = {id(one): one for one, _ in tokens}.values()
    return first, second


def find_terms(frame: ModuleFrame, maker: Operation, depth: int = MAX_STEPS) -> list[Sized]:
    """Return the tensors of tokens that an addition adds up, those of sums that it alone uses among them, with their entries.

    A sum that other operations use too is a residual stream, to which others were added.
    """
    terms = []
    for one, size in find_token_inputs(frame, maker):
        makers = frame.find_makers(one)
        is_sum = len(makers) == 1 and not makers[0].child and infer_role(makers[0].name) is Role.ADD
        terms += find_terms(frame, makers[0], depth - 1) if is_sum and depth and is_used_once(frame, one) else [(one, size)]
    return terms


def is_broadcast_pair(frame: ModuleFrame, x: TensorRef, size: int) -> bool:
    """Return whether x was made, entry by entry, from two tensors of tokens that were broadcast against each other.

    `size` is the number of entries of x, as many as there are pairs: a layer of features of pairs makes others.
    """

    def goes_on(maker: Operation, n: int, _: int) -> bool:
        return n == size and (not is_end(maker) or (maker.child is not None and bool(maker.name)))

    for *_, makers in walk_back([frame], (x, size), goes_on):
        for maker in makers:
            tokens = find_token_inputs(frame, maker)
            is_outer = len(tokens) > 1 and max(n for _, n in tokens) < size
            if is_outer and infer_role(maker.name) in (Role.ADD, Role.MULTIPLY) and are_all_tokens(frame, tokens):
                return True
    return False


def find_meeting(frame: ModuleFrame, ref: TensorRef, size: int) -> tuple[Operation, list[Sized], int] | None:
    """Return the last operation that a tensor was made by from two tensors of tokens, with these and the entries of its result.

    `size` is the number of entries of the tensor. The search ends at a product or a sum.
    """
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(ref)
        if not makers:
            return None
        tokens = find_token_inputs(frame, makers[-1])
        if len({id(one) for one, _ in tokens}) > 1:
            return makers[-1], tokens, size
        core = strip_affixes(makers[-1].name)
        is_sum = core != "cumsum" and infer_role(core) in (Role.PRODUCT, Role.SUM)
        if len(tokens) != 1 or is_sum:
            return None
        ref, size = tokens[0]
    return None


def find_token_inputs(frame: ModuleFrame, maker: Operation) -> list[Sized]:
    """Return the arguments of an operation that hold tokens, with their numbers of entries.

    Not an index that picks entries, nor the largest of what it is subtracted from.
    """
    inputs = list(zip(maker.given, maker.sizes, strict=False))[: 1 if maker.name in GATHERS else None]
    if len(inputs) == 2 and infer_role(maker.name) is Role.ADD and is_largest(frame, inputs[1][0], inputs[0][0]):
        del inputs[1]
    return [(one, size) for one, size in inputs if frame.find_contents(one) >= LEARNED]


def is_largest(frame: ModuleFrame, x: TensorRef, of: TensorRef) -> bool:
    """Return whether a tensor is the largest entries of another one along an axis, or the logarithm of the sum of all."""
    has_reduced = False
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(x)
        core = strip_affixes(makers[-1].name) if makers else ""
        if x is of or core not in VIEWED | COPIES | ROW_REDUCTIONS:
            break
        has_reduced |= core in ROW_REDUCTIONS
        x = makers[-1].given[0]
    return has_reduced and x is of


def is_pairing(frame: ModuleFrame, maker: Operation, tokens: list[Sized], size: int, last: int) -> bool:
    """Return whether an operation formed pairs of tokens: `size` entries, with `last` features each."""
    sizes = [one for _, one in tokens]
    if maker.name in JOINS:
        are_expanded = [is_expanded(frame, *one) for one in tokens]
        # or one query beside all keys of its row
        return sum(are_expanded) > 1 or (any(are_expanded) and are_all_tokens(frame, tokens))
    if size > max(sizes):
        return True
    role = infer_role(maker.name)
    if role is Role.MULTIPLY:
        return last > 0 and min(sizes) >= last and not min(sizes) % last
    if role is Role.ADD and (min(sizes) < size or any(is_expanded(frame, *one) for one in tokens)):
        # one query for all keys of its row: additive attention
        return last > 0 and not min(sizes) % last and are_all_tokens(frame, tokens)
    return last > 0 and strip_affixes(maker.name) == "sub" and min(sizes) == size


def are_all_tokens(frame: ModuleFrame, tokens: list[Sized]) -> bool:
    """Return whether all tensors were computed from the module's inputs, none by weights alone but of a state that is zeros."""
    others = [one for one, _ in tokens if frame.find_contents(one) != TOKEN]
    return len(others) < len(tokens) and all(starts_as_zeros(frame, one) for one in others)
