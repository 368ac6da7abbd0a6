"""Contexts of exponentials, which a softmax divides by their sums after the product with the values, or never.

A recorded map divides the rows of weights by their sums. Whether the model does so too is only known when it has divided the
context; until then the divisor is followed through every change of layout.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.score_form import PERMUTES, SAME, VIEWS

DIVIDED = "the rows of its weights do not sum to 1 where the values are multiplied; in the map they are divided by their sums"
DIVIDES, MULTIPLIES = {"div", "divide", "true_divide", "truediv"}, {"mul", "multiply"}
LAYOUTS = VIEWS | PERMUTES | SAME
ROUNDINGS = 8  # of a divisor, each by half a unit in the last place, times the root of the number of its terms


class UndividedContext(NamedTuple):
    """A call, what its context is yet to be divided by, in the layout of the context, and how many keys that sums."""

    call: AttentionCall
    divisor: Tensor
    keys: int


class UndividedContexts:
    """The contexts of one forward that are not yet divided by the sums of their weights."""

    def __init__(self) -> None:
        self.contexts = WeakTensorKeyDictionary()
        self.calls: dict[AttentionCall, Any] = {}  # those that nothing has divided yet, with what `add` was given as owner

    def __bool__(self) -> bool:
        return bool(self.calls)

    def clear(self) -> None:
        """Forget all contexts."""
        self.contexts.clear()
        self.calls.clear()

    def add(self, context: Tensor, call: AttentionCall, divisor: Tensor, owner: Any) -> None:
        """Follow the context of a call until it is divided by the divisor, of the same shape."""
        self.contexts[context] = UndividedContext(call, divisor.detach(), call.k.shape[2])
        self.calls[call] = owner

    def follow_function(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow a context through a function that changes its layout; a division by the divisor ends the following."""
        places = [n for n, x in enumerate(args) if isinstance(x, Tensor) and x in self.contexts]
        if not places or not isinstance(result, Tensor):
            return
        found, core = self.contexts[args[places[0]]], strip_affixes(name)
        other = next((x for n, x in enumerate(args) if n != places[0] and isinstance(x, Tensor)), None)
        if core in LAYOUTS or name in LAYOUTS:
            self.contexts[result] = found._replace(divisor=func(found.divisor, *args[1:], **kwargs))
        elif other is not None and (
            (core in DIVIDES and places[0] == 0 and is_divisor(other, found))
            or (core in MULTIPLIES and is_divisor(other.reciprocal(), found))
        ):
            self.calls.pop(found.call, None)


def is_divisor(x: Tensor, context: UndividedContext) -> bool:
    """Return whether a tensor is what a context is to be divided by, up to rounding; a row of zeros has any divisor."""
    divisor = context.divisor
    try:
        x = x.to(divisor.dtype).expand(divisor.shape)
    except RuntimeError:  # of another shape
        return False
    bound = ROUNDINGS * context.keys**0.5 * torch.finfo(divisor.dtype).eps
    fits = ((x - divisor).abs() <= bound * divisor.abs()) | (divisor == 0) | divisor.isnan()
    return bool(fits.all())
