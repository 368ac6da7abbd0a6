"""The outputs of linear attention, from the product that completes a call until its module ends.

What a layer multiplies or divides the rows of its output by, as a normalizer, is followed through every change of layout. That
a product is linear attention is known by the feature maps of its queries and keys, not by names.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import find_ancestors
from regard.observe.interception.handwritten.ancestors.feature_maps import is_feature_map
from regard.observe.interception.handwritten.ancestors.token_pairs import find_meeting
from regard.observe.interception.handwritten.ancestors.windows import list_joined
from regard.observe.interception.handwritten.linear.chunked_attention import ChunkedCall, find_input_length
from regard.observe.interception.handwritten.linear.chunked_attention import read_call as read_chunks
from regard.observe.interception.handwritten.linear.chunked_attention import start_call as start_chunked_call
from regard.observe.interception.handwritten.linear.linear_attention import (
    ChainRoles,
    are_projected_tokens,
    find_roles,
    has_moved_axes,
    is_attention,
    mixes_within_tokens,
)
from regard.observe.interception.handwritten.linear.linear_call import CHANGED, LinearCall, read_call
from regard.observe.interception.handwritten.linear.linear_scores import list_token_lengths
from regard.observe.interception.handwritten.linear.running_chunks import (
    UNCHANGED,
    UNJOINED,
    RunningChunk,
    RunningChunks,
    join_running_chunks,
)
from regard.observe.interception.handwritten.linear.unnormalized_call import ActivatedCall
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, Labels, align_labels, label_terms
from regard.observe.interception.handwritten.products.score_form import COPIES, FUSED, PERMUTES, PRODUCTS, QUOTIENTS, VIEWS
from regard.observe.interception.handwritten.products.tensor_axes import AxisTable
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.handwritten.softmax.undivided_contexts import PARTS
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.provenance import LIKE_ANOTHER, ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall
from regard.observe.interception.thread_state import STATE, explain_error, report_missed

COPIED = "it is linear attention, whose keys were repeated before they were multiplied with the values, which is not followed"
ChangeHandler = Callable[[RecurrenceCall, CallAdapter], tuple[RecurrenceCall, CallAdapter]]
KERNEL = "by hand: linear attention, {}"
ADDS = {"add", "addcmul", "baddbmm", "addmm"}


class PlacedEntries(NamedTuple):
    """A call, and the places in its first output (b, h, q, e) of the entries of a tensor that was made of that."""

    call: LinearCall | ActivatedCall | ChunkedCall
    places: Tensor


class FoundCall(NamedTuple):
    """A call that a module has made, and why it cannot be read, if so."""

    frame: "weakref.ref[ModuleFrame]"
    kernel: str
    call: LinearCall | ActivatedCall | ChunkedCall | None
    reason: str = ""
    roots: int = 0  # of its weights, if it has any
    output: "weakref.ref[Tensor] | None" = None
    later: "tuple[ChunkedCall, ...]" = ()  # chunks of the same loop
    chunk: RunningChunk | None = None  # if it is of one of several chunks of running sums

    def read(self) -> tuple[RecurrenceCall, CallAdapter]:
        """Return the call in terms of a recording; it has run already. Raises UnreadableError if it cannot be read."""
        if self.call is None:
            raise UnreadableError(self.reason)
        if isinstance(self.call, ChunkedCall):
            return read_chunks([self.call, *self.later]), CallAdapter(lambda: None)
        return self.call.read(), CallAdapter(lambda: None)


class LinearContexts:
    """The linear attention of the modules that run."""

    def __init__(self, table: AxisTable) -> None:
        self.found: list[FoundCall] = []
        self.contexts = WeakTensorKeyDictionary()
        self.chunks = RunningChunks(table)

    def clear(self) -> None:
        """Forget all calls."""
        self.found.clear()
        self.contexts.clear()
        self.chunks.clear()

    def take_calls(self, frame: ModuleFrame) -> list[FoundCall]:
        """Return the calls of a module that ends, and forget them."""
        ended = [one for one in self.found if one.frame() is frame]
        self.found = [one for one in self.found if one.frame() is not frame]
        loops = dict.fromkeys(one.chunk.loop for one in ended if one.chunk is not None)
        others = [one for one in ended if one.chunk is None]
        return join_chunks(others) + [self.join_loop(ended, loop) for loop in loops]

    def join_loop(self, ended: list[FoundCall], loop: int) -> FoundCall:
        """Return the call that the chunks of a loop amount to."""
        parts = [(one.chunk, one) for one in ended if one.chunk is not None and one.chunk.loop == loop]
        first = parts[0][1]
        calls = [(chunk, one.call if isinstance(one.call, LinearCall) else None) for chunk, one in parts]
        has_others = any(one.call is None and one.chunk is None for one in ended)  # perhaps chunks with other sums
        call, reason = None, first.reason or UNJOINED
        try:
            with disable_modes(), torch.no_grad():
                call = None if has_others else join_running_chunks(calls)
        except Exception as error:  # must not stop the model
            reason = explain_error(error)
        return first._replace(call=call, reason="" if call is not None else reason, chunk=None)

    def forget_calls(self, outputs: "list[weakref.ref[Tensor]]") -> None:
        """Forget the calls with these outputs, which are recorded as parts of a loop."""
        known = {*map(id, outputs)}  # equal references would compare the tensors
        self.found = [one for one in self.found if id(one.output) not in known]

    def start_call(
        self,
        frames: list[ModuleFrame],
        table: AxisTable,
        name: str,
        product: LabelledProduct | None,
        factors: list[tuple[Tensor, Labels]],
        x: Tensor,
        trace: Trace,
        y: Tensor,
        has_softmax: bool = False,
    ) -> bool:
        """Start a call if y is a product of queries with x, products of keys with values; return whether it is one.

        Other factors of y have the labels that stand beside them. A running sum needs no feature maps: nothing else has one.
        Nor do queries, keys and values that layers have made. Keys need none where queries are a softmax over their features
        (`has_softmax`), which are no keys themselves.
        """
        if product is None or not y.numel():
            return False
        place = product.find_place(x)
        q, kernel = product.operands[1 - place], KERNEL.format(strip_affixes(name))
        queries = weakref.ref(q), q.numel()
        is_running = trace.form is not None and trace.form.has_running_sum
        is_running |= trace.has_copied_keys and "cumsum" in trace.changes
        has_map = is_feature_map(frames, queries)
        if not is_running and mixes_within_tokens(frames, product, product.list_rows(1 - place)):
            return False
        is_known = True  # whether a product that cannot be read is linear attention all the same
        try:
            if trace.form is None or trace.dims is None or has_moved_axes(table, trace.form, trace.dims):
                if not (is_running or has_map):
                    return False
                if trace.has_copied_keys:
                    raise UnreadableError(COPIED)
                if not multiplies_features(frames, x):
                    return False
                raise UnreadableError(CHANGED.format(" and ".join(dict.fromkeys(trace.changes)) or "moves of entries"))
            dims = product.build_dims(table, {place: trace.dims})
            roles = find_roles(table, trace.form, q, dims[1 - place], dims[2])
            if roles is None or not roles.k.numel() or not is_attention(frames, table, roles):
                return False
            is_known = has_map and (roles.is_causal or has_softmax or has_feature_map(frames, roles.k, x))
            is_known |= is_running and roles.is_causal
            if not is_known and (is_running or not are_projected_tokens(frames, table, roles)):
                return False
            call, places = read_call(table, roles, trace, product, y, kernel)
        except UnreadableError as error:
            if is_known:
                self.miss_call(frames, name, str(error), y)
            return is_known
        self.add_call(frames, call, places, product, factors, y)
        self.found[-1] = self.found[-1]._replace(chunk=self.chunks.sums.get(x))
        return True

    def miss_call(self, frames: list[ModuleFrame], name: str, reason: str, y: Tensor) -> None:
        """Add a call with output y that a function of this name completes and that cannot be read."""
        kernel = KERNEL.format(strip_affixes(name))
        self.found.append(FoundCall(weakref.ref(frames[-1]), kernel, None, reason, output=weakref.ref(y)))

    def start_chunk(
        self,
        frames: list[ModuleFrame],
        table: AxisTable,
        name: str,
        product: LabelledProduct,
        factors: list[tuple[Tensor, Labels]],
        roles: ChainRoles,
        trace: Trace,
        y: Tensor,
    ) -> None:
        """Start a call of masked scores of chunks of tokens that are multiplied with values to y."""
        try:
            kernel = KERNEL.format(strip_affixes(name))
            lengths = list_token_lengths(frames[-1], table, roles)
            call, places = start_chunked_call(table, roles, trace, product, y, kernel, lengths)
        except UnreadableError as error:
            self.miss_call(frames, name, str(error), y)
        else:
            call.earlier = self.list_ancestors(frames, [roles.q, roles.k, roles.v])
            self.add_call(frames, call, places, product, factors, y)

    def has_chunks(self, frame: ModuleFrame) -> bool:
        """Return whether a module has multiplied scores of chunks of tokens with values."""
        return any(isinstance(one.call, ChunkedCall) and one.frame() is frame for one in self.found)

    def start_call_of_scores(
        self,
        frames: list[ModuleFrame],
        table: AxisTable,
        name: str,
        product: LabelledProduct,
        factors: list[tuple[Tensor, Labels]],
        roles: ChainRoles,
        trace: Trace,
        y: Tensor,
    ) -> bool:
        """Start a call of scores that are multiplied with values to y; return whether they have the formula of one."""
        try:
            call, places = read_call(table, roles, trace, product, y, KERNEL.format(strip_affixes(name)))
        except UnreadableError:
            return False
        self.add_call(frames, call, places, product, factors, y)
        return True

    def add_activated_call(
        self, frames: list[ModuleFrame], call: RecurrenceCall, places: Tensor, y: Tensor, roots: int
    ) -> None:
        """Add a call of activated scores with output y, whose entries have these places in (b, h, q, e)."""
        activated = ActivatedCall.copy_call(call)
        self.found.append(FoundCall(weakref.ref(frames[-1]), call.kernel, activated, "", roots, weakref.ref(y)))
        self.contexts[y] = PlacedEntries(activated, places)

    def add_call(
        self,
        frames: list[ModuleFrame],
        call: LinearCall | ChunkedCall,
        places: Tensor,
        product: LabelledProduct,
        factors: list[tuple[Tensor, Labels]],
        y: Tensor,
    ) -> None:
        """Add a call with output y, which other factors have multiplied."""
        self.found.append(FoundCall(weakref.ref(frames[-1]), call.kernel, call, output=weakref.ref(y)))
        self.contexts[y] = context = PlacedEntries(call, places)
        for factor, labels in factors:
            self.multiply_rows(context, y, align_labels(factor, labels, product.result))

    def change_output(self, y: Tensor, change: ChangeHandler) -> Tensor:
        """Return what an intervention makes of y, the output of the call that was added last, and follow it in place of y."""
        last = self.found[-1]
        context = self.contexts.get(y)
        if not isinstance(last.call, LinearCall) or context is None or context.call is not last.call:
            return y
        if last.chunk is not None:
            report_missed(last.kernel, UNCHANGED, [one for one in STATE.watchers if one.can_change_calls])
            return y
        call = last.call
        with suppress(UnreadableError):  # the call stays as it is, which is reported when its module ends
            _, adapter = change(call.read(), call.adapt(y, context.places))
            new: Tensor = adapter.run()
            if new is not y:
                call.keep_unchanged()
                self.contexts[new] = context
                self.found[-1] = last._replace(output=weakref.ref(new))
            return new
        return y

    def follow_function(self, func: Callable[..., Any], name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow the output of a call through a function that changes its layout, or multiplies or divides its rows."""
        read = args[:1] if strip_affixes(name) in LIKE_ANOTHER else args
        place = next((n for n, x in enumerate(read) if isinstance(x, Tensor) and x in self.contexts), None)
        if place is None:
            return
        context, core = self.contexts[args[place]], name if name in PERMUTES else strip_affixes(name)
        if core in ("sub", "subtract") and place == 1 and is_deflated(context.call, args[0]):
            self.found = [one for one in self.found if one.call is not context.call]
        if isinstance(context.call, ChunkedCall) and core in ADDS and isinstance(result, Tensor):
            self.add_to_chunk(context, args, place, result)
        elif core in PRODUCTS | QUOTIENTS and len(args) == 2 and not (core in QUOTIENTS and (place or kwargs)):
            by = torch.as_tensor(args[1 - place], device=result.device).detach().to(context.call.row_scale.dtype)
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
        elif core in PERMUTES | PARTS and place == 0:
            parts = func(context.places, *args[1:], **kwargs)
            for y, places in [(result, parts)] if isinstance(result, Tensor) else zip(result, parts, strict=True):
                self.contexts[y] = context._replace(places=places)

    def add_to_chunk(self, context: PlacedEntries, args: Any, place: int, result: Tensor) -> None:
        """Follow the sum of the output of a chunk with something else, perhaps with what earlier chunks add."""
        call, places = context
        assert isinstance(call, ChunkedCall)
        if result.shape != places.shape or places.numel() != call.outputs.numel() or len(call.columns) < call.v.shape[3]:
            return
        call.add_sum(result.detach().flatten()[places.flatten().argsort()].view(*call.row_scale.shape, -1))
        self.contexts[result] = context
        others = [x for n, x in enumerate(args) if n != place and isinstance(x, Tensor)]
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
        call, places = context
        rows, e = call.row_scale.numel(), call.v.shape[3]
        if y.shape != places.shape or not places.numel() or places.numel() % rows:
            return False
        order = places.flatten().argsort()
        grid = places.flatten()[order].view(rows, -1)
        factor, outputs = (x.detach().expand(y.shape).reshape(-1)[order].view(grid.shape) for x in (by, y))
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


def join_chunks(found: list[FoundCall]) -> list[FoundCall]:
    """Return calls with those of the chunks of a loop as one, if the module was given as many tokens."""
    joined: list[FoundCall] = []
    last: tuple[int, ...] | None = None
    for one in found:
        shape = (len(one.call.q), *one.call.q.shape[3:], *one.call.v.shape[3:]) if isinstance(one.call, ChunkedCall) else None
        if shape is not None and shape == last and isinstance(one.call, ChunkedCall):
            joined[-1] = joined[-1]._replace(later=(*joined[-1].later, one.call))
        else:
            joined.append(one)
        last = shape
    return [part for one in joined for part in ([one] if is_loop_of_chunks(one) else split_chunks(one))]


def is_loop_of_chunks(found: FoundCall) -> bool:
    """Return whether a call is one, or all chunks of the tokens of a module."""
    if not isinstance(found.call, ChunkedCall) or not found.later:
        return True
    calls = [found.call, *found.later]
    return find_input_length(sum(one.tokens for one in calls), calls[-1].tokens, calls[0].lengths) > 0


def split_chunks(found: FoundCall) -> list[FoundCall]:
    """Return each call of several that were joined."""
    return [found._replace(call=one, later=()) for one in (found.call, *found.later)]


def is_deflated(call: LinearCall | ActivatedCall | ChunkedCall, x: Any) -> bool:
    """Return whether x is the keys or the values of each channel: less the output of a call, what a projection leaves of it."""
    if not isinstance(call, LinearCall) or call.q.shape[-1] > 1 or not isinstance(x, Tensor):
        return False
    return x.numel() == call.k.numel() and x.data_ptr() in (call.k.data_ptr(), call.v.data_ptr())


def has_feature_map(frames: list[ModuleFrame], k: Tensor, x: Tensor) -> bool:
    """Return whether a feature map made the keys k of x, products of keys with values."""
    ref = weakref.ref(k)
    if any(frame.find_makers(ref) for frame in frames):
        return is_feature_map(frames, (ref, k.numel()))
    return multiplies_features(frames, x)  # keys in the order that x has them in, or an argument


def multiplies_features(frames: list[ModuleFrame], x: Tensor) -> bool:
    """Return whether x was made of a product of a feature map with other tokens, or joined of such products."""
    parts = list_joined(frames[-1], (weakref.ref(x), x.numel()))
    meetings = [find_meeting(frames[-1], *part) for part in parts]
    return all(one is not None and any(is_feature_map(frames, given) for given in one[1]) for one in meetings)
