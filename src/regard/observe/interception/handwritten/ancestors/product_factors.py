"""The factors of a product, entry by entry, in whatever layout or dtype it is, by weak references."""

from collections.abc import Hashable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS, TensorRef
from regard.observe.interception.handwritten.products.labelled_product import Labels
from regard.observe.interception.handwritten.products.score_form import COPIES, PERMUTES, PRODUCTS, QUOTIENTS, VIEWS
from regard.observe.interception.provenance import ModuleFrame, Operation

MOVES = VIEWS | PERMUTES | COPIES | {"expand", "expand_as", "broadcast_to"}
IN_ORDER = VIEWS | COPIES | {"getitem"}  # keep the order of entries
FUNCTIONS = {"exp", "sigmoid", "relu"}  # of one tensor alone, that are computed again where their results were freed
UNCHANGED = (nn.Dropout, nn.Identity)  # return their input itself, in evaluation


class Use(Enum):
    """What is done with a product by another tensor."""

    MULTIPLY = auto()
    DIVIDE = auto()
    HIDE = auto()  # fill it with zeros where the tensor is True


USES = {**dict.fromkeys(PRODUCTS, Use.MULTIPLY), **dict.fromkeys(QUOTIENTS, Use.DIVIDE), "masked_fill": Use.HIDE}


class Factor(NamedTuple):
    """A tensor by which a product is multiplied or divided, and its number of entries, with the labels of its dimensions.

    A dimension of size 1 has the label None, and several in a row may have one label; labels are None if they are not known.
    """

    tensor: TensorRef
    size: int
    use: Use = Use.MULTIPLY
    labels: Labels | None = None
    function: str = ""  # of torch, whose result for the tensor is the factor

    def read(self) -> tuple[Tensor, Labels]:
        """Return what a product is multiplied or divided by, with one dimension for each label. It must not have been freed."""
        tensor = self.tensor()
        assert tensor is not None
        assert self.labels is not None
        sizes: dict[Hashable, int] = {}
        for label, size in zip(self.labels, tensor.shape, strict=True):
            sizes |= {} if label is None else {label: sizes.get(label, 1) * size}
        x = tensor.detach().reshape([*sizes.values()])
        x = getattr(torch, self.function)(x) if self.function else x
        return ~x.bool() if self.use is Use.HIDE else x, [*sizes]


def expand_product(frame: ModuleFrame, factor: Factor) -> tuple[list[Factor], bool]:
    """Return the factors of an entrywise product or quotient, and whether a number is one; none if it is something else."""
    maker = find_computation(frame, factor.tensor, factor.size)
    core = "" if maker is None or maker.child is not None else strip_affixes(maker.name)
    if maker is None or core not in USES or max(maker.sizes, default=0) != factor.size:
        return [], False
    is_square = len(maker.given) == 2 and maker.given[0] is maker.given[1]
    is_in_place = any(one is y for one in maker.given for y in maker.results)
    if is_square or is_in_place or (core in QUOTIENTS and maker.name.startswith("__r")):
        return [], False
    first, *others = zip(maker.given, maker.sizes, strict=True)
    return [Factor(*first), *(Factor(*one, USES[core]) for one in others)], not others


def find_computation(frame: ModuleFrame, x: TensorRef, size: int) -> Operation | None:
    """Return the operation that computed the numbers of a tensor of this size, in another layout, dtype or expanded or not.

    None for an argument of the module, and if several operations wrote them.
    """
    for _ in range(MAX_STEPS):
        makers = [maker for maker in frame.find_makers(x) if not returns_itself(maker, x)]
        if len(makers) != 1:
            return None
        if not moves_entries(makers[0], size):
            return makers[0]
        x, size = makers[0].given[0], makers[0].sizes[0]
    return None


def returns_itself(maker: Operation, x: TensorRef) -> bool:
    """Return whether an operation returned its argument x as it is, as a conversion to the dtype that it has."""
    is_unchanged = maker.child in UNCHANGED or strip_affixes(maker.name) in COPIES
    return is_unchanged and bool(maker.given) and maker.given[0] is x


def moves_entries(maker: Operation, size: int) -> bool:
    """Return whether an operation makes a tensor of this size of the numbers of its first argument, in any layout or dtype."""
    core = strip_affixes(maker.name)
    if core == "getitem":
        return maker.sizes[0] == size and maker.lookup is None
    return maker.child is None and bool(maker.given) and (maker.name in MOVES or core in MOVES)


def restore_factor(frame: ModuleFrame, factor: Factor) -> Factor:
    """Return a factor; where it was freed, that of the tensor that it was made from, with its function if it has one."""
    x, function = factor.tensor, ""
    for _ in range(MAX_STEPS):
        if x() is not None:
            return factor._replace(tensor=x, function=function)
        makers = frame.find_makers(x)
        core = strip_affixes(makers[0].name) if len(makers) == 1 and makers[0].child is None else ""
        if not core or makers[0].sizes[:1] != [factor.size]:
            break
        if core in FUNCTIONS and not function:
            function = core
        elif not (core in IN_ORDER and moves_entries(makers[0], factor.size)):
            break
        x = makers[0].given[0]
    return factor


def label_factor(factor: Factor, x: Tensor) -> Labels | None:
    """Return the labels of a factor's dimensions, those of a product x being numbers; None if it was freed or does not fit.

    A tensor with fewer dimensions has those of its sizes in order, where it was unsqueezed and broadcasts not by itself.
    """
    tensor = factor.tensor()
    if tensor is None:
        return None
    start = x.dim() - tensor.dim()
    if start and tensor.numel() == x.numel():
        return merge_dims(tensor.shape, x.shape)
    if not start and tensor.shape != x.shape and tensor.numel() == x.numel():
        order, own = (sorted(range(one.dim()), key=one.stride, reverse=True) for one in (x, tensor))  # transposed
        is_same = [x.shape[n] for n in order] == [tensor.shape[n] for n in own]
        return [order[own.index(n)] for n in range(x.dim())] if is_same else None
    if start >= 0 and all(size in (1, x.shape[start + n]) for n, size in enumerate(tensor.shape)):
        return [start + n if size > 1 else None for n, size in enumerate(tensor.shape)]
    labels: Labels = []
    rest = iter(range(x.dim()))
    for size in tensor.shape:
        labels.append(None if size == 1 else next((n for n in rest if x.shape[n] == size), None))
    return labels if all(label is not None or size == 1 for label, size in zip(labels, tensor.shape, strict=True)) else None


def merge_dims(shape: Sequence[int], merged: Sequence[int]) -> Labels | None:
    """Return the dimension of a merged shape that holds each dimension of a shape, None for size 1; None if it splits one."""
    labels: Labels = []
    rest = [(n, size) for n, size in enumerate(merged) if size > 1]
    count = 1
    for size in shape:
        if size > 1:
            count *= size
            if not rest or rest[0][1] % count:
                return None
        labels.append(rest[0][0] if size > 1 else None)
        if rest and count == rest[0][1]:
            del rest[0]
            count = 1
    return labels
