"""Contexts of exponentials, which a softmax divides by their sums after the product with the values, or never.

A recorded map divides the rows of weights by their sums. Whether the model does so too is only known when it has divided the
context; until then the divisor is followed through every change of layout.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.score_form import (
    COPIES,
    PERMUTES,
    PRODUCTS,
    QUOTIENTS,
    SLICES,
    VIEWS,
)
from regard.observe.interception.provenance import JOINS, LIKE_ANOTHER, is_in_place
from regard.observe.interception.tensor_arguments import list_entries

DIVIDED = "the rows of its weights do not sum to 1 where the values are multiplied; in the map they are divided by their sums"
NEARLY = "the rows of its weights sum to 1 up to {:.1g}; in the map they are divided by their sums"
BY_MORE = "its context is divided by more than the sums of its weights, as with a sink; in the map it is the sums alone"
UNFOLLOWED = "what its context is divided by is not followed through {}; in the map it is the sums of its weights"
UNSEEN = "its tensors are split among ranks, so it is not seen what its context is divided by; in the map it is the sums"
BLOCKS = "its softmax is computed over blocks of keys, one after the other: name its weights with regard.attends"
NEAR = 1e-3  # of 1: an epsilon beside the sums is no mistake
LAYOUTS = VIEWS | PERMUTES | COPIES | SLICES
OPAQUE = {"copy", "setitem", "einsum", "addcdiv", "addcmul"}  # which may divide, or write what is divided later
ENDS = {"linear", "matmul", "mm", "bmm", "addmm", "add"}  # whose input is a context that nothing divides any more
DIVISOR_ROUNDINGS = 8  # of a divisor, each by half a unit in the last place, times the root of the number of its terms


class UndividedContext(NamedTuple):
    """The calls of contexts, what these are yet to be divided by, in their layout, and how many keys that sums at most.

    function is that by which a tensor was made of contexts that are not followed any further; its divisor is theirs.
    """

    calls: tuple[AttentionCall, ...]
    divisor: Tensor
    keys: int
    function: str = ""


class UndividedContexts:
    """The contexts of one forward that are not yet divided by the sums of their weights."""

    def __init__(self) -> None:
        self.contexts = WeakTensorKeyDictionary()
        self.notes: dict[AttentionCall, tuple[str, Any]] = {}  # of calls: what is to be noted at the end, and their owner

    def clear(self) -> None:
        """Forget all contexts."""
        self.contexts.clear()
        self.notes.clear()

    def add(self, context: Tensor, call: AttentionCall, divisor: Tensor, owner: Any) -> None:
        """Follow the context of a call until it is divided by the divisor, of the same shape."""
        self.contexts[context] = UndividedContext((call,), divisor.detach(), call.k.shape[2])
        self.notes[call] = describe_sums(divisor.detach()), owner

    def follow_function(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow a context through a function that changes its layout or joins it with others; a division ends the following.

        If what another function makes of a context is used further on, it is noted that this is not followed: it may be divided
        by other means. A context that is only inspected is not.
        """
        core = strip_affixes(name)
        read = args[:1] if core in LIKE_ANOTHER else args
        places = [n for n, x in enumerate(read) if isinstance(x, Tensor) and x in self.contexts]
        if not places:
            self.follow_joined(func, core, args, kwargs, result)
            return
        contexts = [self.contexts[args[n]] for n in places]
        if any(one.function for one in contexts):
            self.note_uses(contexts, result)
            return
        found = contexts[0]
        other = next((x for n, x in enumerate(args) if n != places[0] and isinstance(x, Tensor)), None)
        if (core in LAYOUTS or name in LAYOUTS) and places[0] == 0:
            divisor = found.divisor.clone() if is_in_place(name) else found.divisor
            parts = func(divisor, *args[1:], **kwargs)
            for y, part in [(result, parts)] if isinstance(result, Tensor) else zip(result, parts, strict=True):
                self.contexts[y] = found._replace(divisor=part)
        elif core in OPAQUE:
            if places[-1]:  # else other numbers are written into the context
                self.note(contexts[-1], UNFOLLOWED.format(core))
        elif core in PRODUCTS and other is not None and other.is_floating_point():
            self.divide(found, other.reciprocal())
        elif core in QUOTIENTS and other is not None and places[0] == 0:
            self.divide(found, other)
        elif core not in ENDS:
            for y in list_results(result):
                if y not in self.contexts:
                    self.contexts[y] = found._replace(function=core)

    def list_notes(self) -> list[tuple[AttentionCall, str, Any]]:
        """Return each call whose context was not divided by its sums, its note and its owner; several of a query are blocks."""
        found = [(call, note, owner) for call, (note, owner) in self.notes.items()]
        return [
            (
                call,
                BLOCKS
                if any(own == owner and one is not call and torch.equal(one.q, call.q) for one, _, own in found)
                else note,
                owner,
            )
            for call, note, owner in found
        ]

    def note_uses(self, contexts: Sequence[UndividedContext], result: Any) -> None:
        """Note of what functions made of contexts that it is used further on, if its result is more than an inspection."""
        for one in contexts if list_results(result) else ():
            if one.function:
                self.note(one, UNFOLLOWED.format(one.function))

    def follow_joined(self, func: Callable[..., Any], core: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow contexts that a function of this name joins; other tensors among them are not to be divided."""
        entries = next((x for x in args if isinstance(x, list | tuple)), ())
        contexts = [self.contexts.get(x) if isinstance(x, Tensor) else None for x in entries]
        found = [one for one in contexts if one is not None]
        if any(one.function for one in found):
            self.note_uses(found, result)
        elif found and core in JOINS and isinstance(result, Tensor):
            calls = tuple(dict.fromkeys(call for one in found for call in one.calls))
            divisors = [torch.ones_like(x) if one is None else one.divisor for x, one in zip(entries, contexts, strict=True)]
            divisor = func(divisors, *args[1:], **{key: value for key, value in kwargs.items() if key != "out"})
            self.contexts[result] = UndividedContext(calls, divisor, max(one.keys for one in found))
        else:
            for one in found:
                self.note(one, UNFOLLOWED.format(core))

    def divide(self, context: UndividedContext, by: Tensor) -> None:
        """Note what the division of a context leaves its rows of weights to sum to; nothing if that is 1."""
        divisor = context.divisor
        try:
            sums = divisor / by.detach().to(divisor.dtype).expand(divisor.shape)
        except RuntimeError:  # of another shape
            self.note(context, UNFOLLOWED.format("div"))
            return
        if is_one(sums.masked_fill(divisor == 0, 1), context.keys):
            self.drop(context)
        else:
            is_by_more = bool((sums <= 1).all()) and float(sums.amax() - sums.amin()) > NEAR
            note = describe_sums(sums)
            self.note(context, BY_MORE if is_by_more and note == DIVIDED else note)

    def note(self, context: UndividedContext, note: str) -> None:
        """Change what is to be noted of the calls of a context, if anything is."""
        for call in context.calls:
            if call in self.notes:
                self.notes[call] = note, self.notes[call][1]

    def drop(self, context: UndividedContext) -> None:
        """Note nothing of the calls of a context."""
        for call in context.calls:
            self.notes.pop(call, None)
        if not self.notes:
            self.contexts.clear()


def list_results(result: Any) -> list[Tensor]:
    """Return the results of a function that a context may live on in: neither a comparison nor a single number."""
    tensors = [result] if isinstance(result, Tensor) else list_entries(result)
    return [y for y in tensors if isinstance(y, Tensor) and y.dim() and y.is_floating_point()]


def is_one(sums: Tensor, keys: int) -> bool:
    """Return whether quotients of sums of this many keys are 1 up to rounding, where they are numbers."""
    bound = DIVISOR_ROUNDINGS * keys**0.5 * torch.finfo(sums.dtype).eps
    return bool(((sums - 1).nan_to_num(0).abs() <= bound).all())


def describe_sums(sums: Tensor) -> str:
    """Return the note of rows of weights with these sums, of which those that are 0 or NaN do not count."""
    off = float((sums - 1).abs().masked_fill(sums == 0, 0).nan_to_num(0).amax()) if sums.numel() else 0.0
    return NEARLY.format(off) if off < NEAR else DIVIDED
