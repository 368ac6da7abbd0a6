"""The outputs of linear attention, followed from the product that completes a call until its module ends.

What a layer multiplies or divides the rows of an output by, as a normalizer, is followed through every change of layout.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import find_ancestors
from regard.observe.interception.handwritten.linear.chunk_loops import FoundCall
from regard.observe.interception.handwritten.linear.chunked_attention import ChunkedCall
from regard.observe.interception.handwritten.linear.given_states import READ_STATE, find_product, reads_given_state
from regard.observe.interception.handwritten.linear.linear_call import LinearCall
from regard.observe.interception.handwritten.linear.unnormalized_call import ActivatedCall
from regard.observe.interception.handwritten.products.contraction import ADDING_PRODUCTS
from regard.observe.interception.handwritten.products.labelled_product import align_labels, label_terms
from regard.observe.interception.handwritten.products.score_form import (
    COPIES,
    FUSED,
    PERMUTES,
    PRODUCTS,
    QUOTIENTS,
    SLICES,
    VIEWS,
)
from regard.observe.interception.provenance import LIKE_ANOTHER, ModuleFrame
from regard.observe.interception.thread_state import STATE

SUMS = {"add", "addcmul", *ADDING_PRODUCTS}


class PlacedEntries(NamedTuple):
    """A call, and the places in its first output (b, h, q, e) of the entries of a tensor that was made of that.

    unchanged is what the tensor is without interventions, if these have changed it; `by` (b, h, q), what its rows are yet to be
    multiplied by.
    """

    call: LinearCall | ActivatedCall | ChunkedCall
    places: Tensor
    unchanged: Tensor | None = None
    by: Tensor | None = None


class LinearOutputs:
    """The calls that the running modules have made, and their outputs as far as they are followed."""

    def __init__(self) -> None:
        self.found: list[FoundCall] = []
        self.contexts = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget all calls."""
        self.found.clear()
        self.contexts.clear()

    def follow_function(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow the output of a call through a function that changes its layout, or multiplies or divides its rows."""
        read = args[:1] if strip_affixes(name) in LIKE_ANOTHER else args
        place = next((n for n, x in enumerate(read) if isinstance(x, Tensor) and x in self.contexts), None)
        if place is None:
            return
        core = name if name in PERMUTES else strip_affixes(name)
        if core in ("sub", "subtract") and place == 1 and is_deflated(call := self.contexts[args[1]].call, args[0]):
            self.found = [one for one in self.found if one.call is not call]
        self.follow_context(func, name, core, args, kwargs, place, result)

    def follow_context(
        self, func: Callable[..., Any], name: str, core: str, args: Any, kwargs: Any, place: int, result: Any
    ) -> None:
        """Follow the output of a call, an argument at a place, through a function of a name without affixes."""
        context = self.contexts[args[place]]
        if core in SUMS and (core not in FUSED or isinstance(context.call, ChunkedCall)) and isinstance(result, Tensor):
            self.follow_addition(context, core, args, place, result)
        elif core in PRODUCTS | QUOTIENTS and len(args) == 2 and not (core in QUOTIENTS and (place or kwargs)):
            by = torch.as_tensor(args[1 - place], device=result.device).to(context.call.row_scale.dtype)
            if self.multiply_rows(context, result, by.reciprocal() if core in QUOTIENTS else by):
                self.contexts[result] = context
        elif core in FUSED and len(args) == 3 and (place == 1 or (core == "addcmul" and place)):
            by = args[3 - place].detach().to(context.call.row_scale.dtype)
            by = (by.reciprocal() if core == "addcdiv" else by) * kwargs.get("value", 1)
            self.multiply_rows(context, args[place] * by, by)  # what it is added to is no part of the call
        elif core == "einsum":
            self.follow_einsum(context, place - 1, args, result)
        elif core in VIEWS:
            self.contexts[result] = context._replace(places=context.places.reshape(result.shape))
        elif core in COPIES:
            self.contexts[result] = context
        elif core in PERMUTES | SLICES and place == 0:
            parts = func(context.places, *args[1:], **kwargs)
            for y, places in [(result, parts)] if isinstance(result, Tensor) else zip(result, parts, strict=True):
                self.contexts[y] = context._replace(places=places)

    def divide_rows(self, context: PlacedEntries, y: Tensor, by: Tensor, made: Any, is_quotient: bool) -> bool:
        """Multiply the rows of a call as `multiply_rows` does, by factors that were made of `made`, or are one over it."""
        return self.multiply_rows(context, y, by)

    def follow_addition(self, context: PlacedEntries, core: str, args: Any, place: int, result: Tensor) -> None:
        """Follow the sum of an output with something else, which may be what queries read from a state."""
        if isinstance(context.call, ChunkedCall):
            self.add_to_chunk(context, core, args, place, result)
            return
        others = [x for n, x in enumerate(args) if n != place and isinstance(x, Tensor)]
        terms = [(*map(weakref.ref, others),)] if core in ADDING_PRODUCTS else []
        if reads_given_state(STATE.frames[-1], args[place], others, terms):
            context.call.note = READ_STATE

    def add_to_chunk(self, context: PlacedEntries, core: str, args: Any, place: int, result: Tensor) -> None:
        """Follow the sum of the output of a chunk with something else, perhaps with what earlier chunks add."""
        call, places = context.call, context.places
        assert isinstance(call, ChunkedCall)
        if result.shape != places.shape or places.numel() != call.outputs.numel() or len(call.columns) < call.v.shape[3]:
            return
        call.add_sum(result.detach().flatten()[places.flatten().argsort()].view(*call.row_scale.shape, -1))
        self.contexts[result] = context
        others = [x for n, x in enumerate(args) if n != place and isinstance(x, Tensor)]
        call.added += map(weakref.ref, others)
        is_sure = core in ADDING_PRODUCTS or any(find_product(STATE.frames[-1], x) is not None for x in others)
        call.is_sure |= is_sure
        parts = self.list_ancestors(STATE.frames, others) - call.earlier
        self.found = [one for one in self.found if id(one.output) not in parts]

    def list_ancestors(self, frames: list[ModuleFrame], tensors: list[Tensor]) -> set[int]:
        """Return the outputs of calls, by the ids of their references, that some tensors were made of in a module."""
        outputs = {id(one.output) for one in self.found}
        return outputs & {one for x in tensors if outputs for one in find_ancestors(frames[-1:], x)}

    def follow_einsum(self, context: PlacedEntries, place: int, args: Any, y: Tensor) -> None:
        """Follow an output through an einsum, its operand at a place, that multiplies each row by a factor."""
        labels, result = label_terms(args[0], args[1:])
        if len(labels) == 2 and set(labels[place]) == set(result) >= set(labels[1 - place]):
            placed = context._replace(places=align_labels(context.places, labels[place], result))
            if self.multiply_rows(placed, y, align_labels(args[2 - place].detach(), labels[1 - place], result)):
                self.contexts[y] = placed

    def multiply_rows(self, context: PlacedEntries, y: Tensor, by: Tensor) -> bool:
        """Multiply the rows of a call by factors that broadcast to its output y; return whether there is one for each row.

        y has entries of all rows, in the same columns of each.
        """
        call, places = context.call, context.places
        rows, e = call.row_scale.numel(), call.v.shape[3]
        if y.shape != places.shape or not places.numel() or places.numel() % rows:
            return False
        order = places.flatten().argsort()
        grid = places.flatten()[order].view(rows, -1)
        by = by if any(watcher.can_change_calls for watcher in STATE.watchers) else by.detach()  # whose gradients a cut needs
        factor, outputs = (x.expand(y.shape).reshape(-1)[order].view(grid.shape) for x in (by, y.detach()))
        if not torch.equal(grid, grid[0] + e * torch.arange(rows, device=grid.device).unsqueeze(-1)):
            return False  # some rows alone
        if not torch.equal(factor, factor[:, :1].expand(factor.shape)):
            return False  # a gate of each channel
        shape = call.row_scale.shape
        of_rows = factor[:, 0].view(shape)
        if isinstance(call, ActivatedCall) and not call.can_multiply(of_rows):
            return False
        call.row_scale = call.row_scale * of_rows
        call.outputs, call.columns = outputs.view(*shape, -1), grid[0]
        return True


def is_deflated(call: LinearCall | ActivatedCall | ChunkedCall, x: Any) -> bool:
    """Return whether x is the keys or the values of each channel: less the output of a call, what a projection leaves of it."""
    if not isinstance(call, LinearCall) or call.q.shape[-1] > 1 or not isinstance(x, Tensor):
        return False
    return x.numel() == call.k.numel() and x.data_ptr() in (call.k.data_ptr(), call.v.data_ptr())
