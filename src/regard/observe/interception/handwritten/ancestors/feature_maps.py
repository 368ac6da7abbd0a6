"""Feature maps of queries and keys: functions of single tokens, found by what a tensor was made of."""

import weakref

from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import (
    MAX_STEPS,
    REPEATS,
    Sized,
    TensorRef,
    is_end,
    walk_back,
)
from regard.observe.interception.handwritten.ancestors.token_pairs import find_token_inputs
from regard.observe.interception.provenance import JOINS, ModuleFrame, Operation
from regard.observe.interception.thread_state import choose_by_numbers

MAX_JOINS = 3  # within each other, in a feature map


def is_feature_map(frames: list[ModuleFrame], x: Sized, max_joins: int = MAX_JOINS, whole: TensorRef | None = None) -> bool:
    """Return whether a nonlinear function or a softmax made x, up to layouts, factors, sums and joins of feature maps alone.

    What another module has made counts if it is at least 0 and no mask. The model's own arguments, as the adjacency matrix of a
    graph, do not. `whole` is a tensor that x was joined to.
    """

    def goes_on(maker: Operation, n: int, size: int) -> bool:
        is_larger = n >= size or strip_affixes(maker.name) in REPEATS  # a smaller tensor is a norm or a factor
        return is_larger and maker.name not in JOINS and not is_end(maker)

    whole = x[0] if whole is None else whole
    for frame, (one, _), makers in walk_back(frames, x, goes_on):
        if any(infer_role(maker.name) in (Role.NONLINEAR, Role.POWER, Role.SOFTMAX) for maker in makers):
            return True
        tensor = next((y for ref in (one, x[0], whole) if (y := ref()) is not None), None)
        if any(maker.child for maker in makers) and tensor is not None and has_features(tensor):
            return True
        for maker in makers:
            parts = find_token_inputs(frame, maker) if maker.name in JOINS else []
            if parts and max_joins and all(is_feature_map(frames, part, max_joins - 1, whole) for part in parts):
                return True
            if any(multiplies_itself(frame, part) for part in parts):
                return True  # a polynomial, whose lower powers are joined with it
    return False


def multiplies_itself(frame: ModuleFrame, x: Sized) -> bool:
    """Return whether a tensor is the products of the features of another one with each other, up to layouts and factors."""
    one, size = x
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(one)
        if not makers or not makers[-1].given:
            return False
        given, sizes = makers[-1].given, makers[-1].sizes
        if len(given) == 2 and given[0] is given[1]:
            return size > sizes[0]
        if is_end(makers[-1]):
            return False
        size = max(sizes)
        one = given[sizes.index(size)]
    return False


def has_fewer_rows(frames: list[ModuleFrame], x: Tensor, rows: int) -> bool:
    """Return whether a module or a product made x of fewer rows of features than these, as a hypernetwork makes weights."""

    def goes_on(maker: Operation, n: int, size: int) -> bool:
        return n >= size and (not is_end(maker) or is_activation(maker))

    for frame, _, makers in walk_back(frames, (weakref.ref(x), x.numel()), goes_on):
        for maker in makers:
            if is_end(maker) and not is_activation(maker):
                counts = [count_rows(one(), size, x.numel() // rows) for one, size in find_token_inputs(frame, maker)]
                if counts and max(counts) < rows:
                    return True
    return False


def is_activation(maker: Operation) -> bool:
    """Return whether an operation is a module that computes a nonlinear function of each entry."""
    return maker.child is not None and bool(maker.name)


def count_rows(x: Tensor | None, size: int, width: int) -> int:
    """Return the number of rows of features in a tensor, tokens last or first; of one that was freed, by half a width."""
    if x is None:
        return 2 * size // width
    if not x.is_floating_point() or not x.dim():
        return size
    features = {x.shape[-1], x.shape[1] if x.dim() > 2 and x.shape[1] > 1 else x.shape[-1]}
    return size // min(features) if size else 0


def has_features(x: Tensor) -> bool:
    """Return whether all numbers are at least 0, and some are neither 0 nor 1."""
    return x.is_floating_point() and choose_by_numbers(bool((x >= 0).all()) and not bool(((x == 0) | (x == 1)).all()))
