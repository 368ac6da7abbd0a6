"""The layer that projected a tensor, found back through views, copies, activations and norms of what it made."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import (
    CONVERSIONS,
    CONVOLUTIONS,
    EXPANDS,
    MAX_STEPS,
    REPEATS,
    VIEWED,
    TensorRef,
    is_end,
    is_norm,
)
from regard.observe.interception.handwritten.ancestors.memory_order import find_strides_before
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation


class Projection(NamedTuple):
    """A tensor that a module or a product made, and the frame in which that ran."""

    tensor: TensorRef
    maker: Operation
    frame: ModuleFrame
    strides: Sequence[int] = ()  # of the dimensions of what was made from it, in its own memory


def find_projection(frames: list[ModuleFrame], x: Tensor) -> Projection | None:
    """Return the tensor that a module or a product made and whose parts, copied, changed entry by entry or normed, x is.

    None if it is not known how far apart its entries were in that tensor.
    """
    one: TensorRef = weakref.ref(x)
    strides: Sequence[int] = x.stride()
    for frame in reversed(frames):
        for _ in range(MAX_STEPS):
            makers = [maker for maker in frame.find_makers(one) if not (maker.given and maker.given[0] is one)]  # in place
            if not makers:
                break  # an argument of the module
            maker = makers[-1]
            if is_end(maker) and not (is_activation(maker) or is_norm(maker)):
                return Projection(one, maker, frame, strides)
            if maker.copy is not None:
                before = find_strides_before(strides, maker.copy, maker.name in REPEATS)
                if before is None:
                    return None
                strides = before
            elif not (is_activation(maker) or is_norm(maker) or keeps_order(maker.name)) or not maker.given:
                return None
            one = maker.given[maker.sizes.index(max(maker.sizes))]
    return None


def keeps_order(name: str) -> bool:
    """Return whether the results of a function have the order in memory of its largest argument: no copy to another one."""
    is_by_entry = infer_role(name) in (Role.NONLINEAR, Role.POWER, Role.ADD, Role.MULTIPLY)
    return is_by_entry or strip_affixes(name) in VIEWED | CONVERSIONS | EXPANDS | {"masked_fill", "where"}


def has_features_last(projection: Projection) -> bool | None:
    """Return whether a layer made a projection with its features behind its tokens; None if it is not known to be a layer.

    A product is a layer if one of its operands is a weight.
    """
    frame, maker = projection.frame, projection.maker
    if maker.child is not None:
        is_linear, is_convolution = (issubclass(maker.child, one) for one in (nn.Linear, CONVOLUTIONS))
        return is_linear if is_linear or is_convolution else None
    if infer_role(maker.name) is Role.CONVOLUTION:
        return False
    operands = maker.given[:2] if strip_affixes(maker.name) == "linear" else maker.given[-2:]
    are_tokens = [frame.find_contents(one) == TOKEN for one in operands]
    return are_tokens[0] if sum(are_tokens) == 1 else None


def is_activation(maker: Operation) -> bool:
    """Return whether an operation is a module that computes a nonlinear function of each entry."""
    return maker.child is not None and bool(maker.name)
