"""Attention written out by hand: no kernel to meet, but a softmax of products that is multiplied with values.

The scores are a product of two tensors that the model computed, or a sum over pairs of them; a router's, a classifier's
or a pooling layer's come from its weights, and are none.
"""

import weakref
from typing import Any

from torch import Tensor

from regard.observe.doors.lineage import Frame, owns, tensors

MULTIPLIES = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__"}
SOFTMAX = {"softmax", "special_softmax", "_softmax", "log_softmax", "exp", "_safe_softmax", "_masked_softmax"}
KEEPS = {  # what scores and weights pass through
    *("add", "add_", "__iadd__", "sub", "sub_", "__rsub__", "mul", "mul_", "__imul__", "multiply"),
    *("div", "div_", "true_divide", "__rtruediv__", "__itruediv__", "max", "min", "maximum", "minimum", "clamp", "clip"),
    *("masked_fill", "masked_fill_", "where", "nan_to_num", "dropout", "tril", "tanh", "pad", "as_strided"),
    *("to", "type_as", "float", "double", "half", "bfloat16", "type", "view", "reshape", "transpose", "permute", "contiguous"),
    *("unsqueeze", "squeeze", "expand", "flatten", "unflatten", "__getitem__", "cat", "clone", "narrow", "addcmul"),
}
HARMLESS = "a module that cannot attend"  # such as dropout, or a network that scores pairs
SCORES = MULTIPLIES | {"linear", "sum", HARMLESS}
WRITES = {"__setitem__", "copy_"}  # into a tensor that then holds scores or weights
PASSES = SOFTMAX | KEEPS | {"__get__", HARMLESS}
FOLLOWED = SCORES | PASSES | WRITES


class Followed:
    """The scores and the weights of this forward, by what made them."""

    def __init__(self) -> None:
        self.scores: dict[int, tuple[weakref.ref[Tensor], bool]] = {}  # by id; whether a softmax has made weights of them

    def clear(self) -> None:
        """Nothing is followed."""
        self.scores.clear()

    def of(self, x: Tensor) -> bool | None:
        """Whether a tensor is weights, True, or scores, False; None where it is neither."""
        found = self.scores.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def note(self, frame: Frame, name: str, args: Any, kwargs: Any, result: Any) -> bool | None:
        """Follows a function: whether it multiplied weights with values; None where it made neither weights nor scores.

        It is one of SCORES, or of FOLLOWED where something is followed already.
        """
        if name in WRITES:
            written = {self.of(x) for x in tensors(args[1:], kwargs)} - {None}
            if written and isinstance(args[0], Tensor):
                self.scores[id(args[0])] = weakref.ref(args[0]), True in written
            return None
        if not isinstance(result, Tensor) or not owns(result):
            return None
        given = tensors(args, kwargs)
        kinds = [self.of(x) for x in given] if self.scores else []
        if name in MULTIPLIES and True in kinds:
            self.clear()
            return True
        if name in SCORES and scores(frame, name, given, result):
            self.scores[id(result)] = weakref.ref(result), False
            return False
        if (True in kinds or False in kinds) and name in PASSES:
            weights = True in kinds or (name in SOFTMAX and result.dim() > 2)
            self.scores[id(result)] = weakref.ref(result), weights
            return False
        return None


def scores(frame: Frame, name: str, given: list[Tensor], result: Tensor) -> bool:
    """Whether a function may have scored pairs: a product of two computed tensors, or a vector of each pair summed up."""
    if name in MULTIPLIES:
        computed = [x for x in given if (made := frame.known(x)) is not None and made.sources]
        return len(computed) > 1 or (given[0].dim() > 3 and given[-1].dim() == 1)
    if not given or given[0].dim() < 4:
        return False
    return (name != "linear" and result.dim() == given[0].dim() - 1) or (name != "sum" and result.shape[-1] == 1)
