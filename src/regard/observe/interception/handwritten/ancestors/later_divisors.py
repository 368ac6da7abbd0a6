"""Divisions of what a loop or chunks of tokens have read, which the recorded map leaves out, as that by the sum of the keys."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from regard.observe.interception.attention_call import CallAdapter
from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.ancestors.layouts import is_layout
from regard.observe.interception.handwritten.products.score_form import QUOTIENTS, SLICES
from regard.observe.interception.provenance import JOINS, ModuleFrame
from regard.observe.interception.recurrent.recurrence_call import RecurrenceCall, RecurrenceFactors

LATER = "its outputs are divided by a tensor after the read, which its map leaves out"
KEEPS = SLICES | JOINS | {"__getitem__", "__setitem__", "copy_"}


def note_division(
    frame: ModuleFrame, outputs: Sequence[TensorRef], read: Callable[[], tuple[RecurrenceCall, CallAdapter]]
) -> tuple[RecurrenceCall, CallAdapter]:
    """Read a call with these outputs, with a note if the module divides them by a tensor. Raises what `read` raises."""
    call, adapter = read()
    if not are_divided(frame, outputs):
        return call, adapter

    def read_factors() -> RecurrenceFactors:
        factors = call.read()
        return replace(factors, note="; ".join(filter(None, (factors.note, LATER))))

    return replace(call, read=read_factors), adapter


def are_divided(frame: ModuleFrame, outputs: Sequence[TensorRef]) -> bool:
    """Return whether outputs, in another layout or with something added, are divided by a tensor that is not a norm of them."""
    followed, made = {*map(id, outputs)}, set[int]()
    for one in frame.list_operations():
        own = [x for x in one.given if id(x) in followed]
        is_divided = bool(own) and strip_affixes(one.name) in QUOTIENTS and len(one.given) > 1 and one.given[0] is own[0]
        if is_divided and not any(id(x) in made for x in one.given[1:]):
            return True
        keeps = is_layout(one) or infer_role(one.name) is Role.ADD or {one.name, strip_affixes(one.name)} & KEEPS
        if own and keeps:
            followed |= {*map(id, one.results)}
        elif own or any(id(x) in made for x in one.given):
            made |= {*map(id, one.results)}
    return False
