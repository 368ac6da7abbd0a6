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
from regard.observe.interception.handwritten.score_form import COPIES, PERMUTES, PRODUCTS, QUOTIENTS, VIEWS
from regard.observe.interception.provenance import is_in_place

DIVIDED = "the rows of its weights do not sum to 1 where the values are multiplied; in the map they are divided by their sums"
NEARLY = "the rows of its weights sum to 1 up to {:.1g}; in the map they are divided by their sums"
BY_MORE = "its context is divided by more than the sums of its weights, as with a sink; in the map it is the sums alone"
UNSEEN = "its tensors are split among ranks, so it is not seen what its context is divided by; in the map it is the sums"
NEAR = 1e-3  # of 1: an epsilon beside the sums is no mistake
LAYOUTS = VIEWS | PERMUTES | COPIES | {"getitem"}
ENDS = {"linear", "matmul", "mm", "bmm", "addmm", "add"}  # whose input is a context that nothing divides any more
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
        self.notes: dict[AttentionCall, tuple[str, Any]] = {}  # of calls: what is to be noted at the end, and their owner

    def __bool__(self) -> bool:
        return bool(self.notes)

    def clear(self) -> None:
        """Forget all contexts."""
        self.contexts.clear()
        self.notes.clear()

    def add(self, context: Tensor, call: AttentionCall, divisor: Tensor, owner: Any) -> None:
        """Follow the context of a call until it is divided by the divisor, of the same shape."""
        self.contexts[context] = UndividedContext(call, divisor.detach(), call.k.shape[2])
        self.notes[call] = describe_sums(divisor.detach()), owner

    def follow_function(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow a context through a function that changes its layout; a division ends the following.

        Nothing is noted of a context that any other function reads: it may be divided by other means.
        """
        places = [n for n, x in enumerate(args) if isinstance(x, Tensor) and x in self.contexts]
        if not places:
            nested = [y for x in args if isinstance(x, list | tuple) for y in x if isinstance(y, Tensor) and y in self.contexts]
            for x in nested:
                self.drop(self.contexts[x].call)
            return
        found, core = self.contexts[args[places[0]]], strip_affixes(name)
        other = next((x for n, x in enumerate(args) if n != places[0] and isinstance(x, Tensor)), None)
        if (core in LAYOUTS or name in LAYOUTS) and isinstance(result, Tensor) and places[0] == 0:
            divisor = found.divisor.clone() if is_in_place(name) else found.divisor
            self.contexts[result] = found._replace(divisor=func(divisor, *args[1:], **kwargs))
        elif core in PRODUCTS and other is not None and other.is_floating_point():
            self.divide(found, other.reciprocal())
        elif core in QUOTIENTS and other is not None and places[0] == 0:
            self.divide(found, other)
        elif core not in ENDS:
            self.drop(found.call)

    def divide(self, context: UndividedContext, by: Tensor) -> None:
        """Note what the division of a context leaves its rows of weights to sum to; nothing if that is 1."""
        divisor = context.divisor
        try:
            sums = divisor / by.detach().to(divisor.dtype).expand(divisor.shape)
        except RuntimeError:  # of another shape
            self.drop(context.call)
            return
        bound = ROUNDINGS * context.keys**0.5 * torch.finfo(divisor.dtype).eps
        off = (sums - 1).masked_fill(divisor == 0, 0).nan_to_num(0)
        if bool((off.abs() <= bound).all()):
            self.drop(context.call)
        elif context.call in self.notes:
            is_by_more = bool((sums <= 1).all()) and float(sums.amax() - sums.amin()) > NEAR
            note = describe_sums(sums)
            self.notes[context.call] = BY_MORE if is_by_more and note == DIVIDED else note, self.notes[context.call][1]

    def drop(self, call: AttentionCall) -> None:
        """Note nothing of a call."""
        self.notes.pop(call, None)
        if not self.notes:
            self.contexts.clear()


def describe_sums(sums: Tensor) -> str:
    """Return the note of rows of weights with these sums, of which those that are 0 or NaN do not count."""
    off = float((sums - 1).abs().masked_fill(sums == 0, 0).nan_to_num(0).amax()) if sums.numel() else 0.0
    return NEARLY.format(off) if off < NEAR else DIVIDED
