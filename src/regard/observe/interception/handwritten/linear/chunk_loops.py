"""Calls of linear attention that a module has made, of which those of chunks of tokens are joined to one when it ends."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.call_dispatch import explain_error
from regard.observe.interception.handwritten.linear.chunked_attention import ChunkedCall, ChunkedLoop
from regard.observe.interception.handwritten.linear.linear_call import LinearCall
from regard.observe.interception.handwritten.linear.running_chunks import ChunkPlace, join_running_chunks
from regard.observe.interception.handwritten.linear.unnormalized_call import ActivatedCall
from regard.observe.interception.plain_tensors import UnreadableError, disable_modes
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall

UNJOINED = "it is linear attention in chunks, of which it is not known how the sums of one are added to those of the next"


class FoundCall(NamedTuple):
    """A call that a module has made, and why it cannot be read, if so."""

    frame: "weakref.ref[ModuleFrame]"
    kernel: str
    call: LinearCall | ActivatedCall | ChunkedCall | ChunkedLoop | None
    reason: str = ""
    roots: int = 0  # of its weights, if it has any
    output: "weakref.ref[Tensor] | None" = None
    chunk: ChunkPlace | None = None  # if it is of a chunk of tokens

    def read(self) -> tuple[RecurrenceCall, CallAdapter]:
        """Return the call in terms of a recording; it has run already. Raises UnreadableError if it cannot be read."""
        if self.call is None:
            raise UnreadableError(self.reason)
        return self.call.read(), CallAdapter(lambda: None)


def join_loops(found: list[FoundCall]) -> list[FoundCall]:
    """Return the calls of a module with those of the chunks of each loop as one."""
    loops: dict[int, list[FoundCall]] = {}
    for one in place_chunks(found):
        loops.setdefault(-1 - len(loops) if one.chunk is None else one.chunk.loop, []).append(one)
    has_others = any(one.call is None and one.chunk is None for one in found)  # perhaps chunks with other sums
    return [call for parts in loops.values() for call in join_loop(parts, has_others)]


def place_chunks(found: list[FoundCall]) -> list[FoundCall]:
    """Return calls, those of masked scores with their places: behind the call before, if that is of such a chunk too."""
    placed: list[FoundCall] = []
    for one in found:
        last = placed[-1] if placed else None
        if isinstance(one.call, ChunkedCall):
            is_next = last is not None and isinstance(last.call, ChunkedCall) and last.call.sizes == one.call.sizes
            before = last.chunk if last is not None and is_next else None
            one = one._replace(chunk=ChunkPlace.start() if before is None else before.follow())
        placed.append(one)
    return placed


def join_loop(parts: list[FoundCall], has_others: bool) -> list[FoundCall]:
    """Return what the calls of the chunks of one loop amount to, if they are of chunks."""
    first, calls = parts[0], [one.call for one in parts]
    if first.chunk is None:
        return parts
    if isinstance(first.call, ChunkedCall):
        loop = ChunkedLoop(tuple(call for call in calls if isinstance(call, ChunkedCall)))
        if not any(one.is_sure for one in loop.calls):
            return []
        return [first._replace(call=loop, chunk=None)] if loop.has_all_tokens() else parts
    call, reason = None, first.reason or UNJOINED
    try:
        with disable_modes(), torch.no_grad():
            known = [(one.chunk, one.call if isinstance(one.call, LinearCall) else None) for one in parts if one.chunk]
            call = None if has_others else join_running_chunks(known)
    except Exception as error:  # must not stop the model
        reason = explain_error(error)
    return [first._replace(call=call, reason="" if call is not None else reason, chunk=None)]
