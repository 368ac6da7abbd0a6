"""Recurrences over tokens that no map was read from, found in the operations of a module when it ends."""

from regard.observe.interception.handwritten.recurrences.state_loop import MIN_TOKENS
from regard.observe.interception.handwritten.unread.unread_loops import (
    LoopKind,
    TokenAxis,
    cuts_tokens,
    find_loop,
    runs_along_tokens,
)
from regard.observe.interception.handwritten.unread.unread_rounds import find_rounds, multiplies_parts
from regard.observe.interception.handwritten.unread.unread_scans import sums_decayed_tokens
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.tensor_arguments import PLAIN

CUTS = {"__getitem__", "narrow", "chunk", "index_select", "gather"}  # may pick single tokens, also without an axis in the log
LOOP = "it multiplies a state by decays that depend on tokens, and adds tokens to it in a loop, in a form that is not followed"
CONSTANT_LOOP = "it multiplies a state by constant decays, and adds tokens to it in a loop, in a form that is not followed"
SCAN = "it adds up tokens with decays that depend on tokens, by running sums over tokens, which are not followed"
MEMORY = "it adds products of keys with values to a state in a loop that reads each state, in a form that is not followed"
CONSTANT_ROUNDS = "it adds up tokens with constant decays, in rounds that join pairs of states, which are not followed"
ROUNDS = "it adds up tokens with decays that depend on tokens, in rounds that join pairs of states, which are not followed"


def find_token_axes(frame: ModuleFrame) -> list[TokenAxis]:
    """Return the axes of a module's inputs (b, t, c) or (t, b, c) along which its operations picked or summed up: quick.

    All axes, if there may be rounds, whose axis is not logged. Without such inputs, those of several (b, h, t, d) or
    (b, t, h, d).
    """
    operations = frame.list_operations()
    picks = [one for one in operations if one.along is not None or one.name in CUTS]
    has_rounds = multiplies_parts(operations)
    inputs = [x for x in frame.input_tensors if type(x) in PLAIN] if picks or has_rounds else []
    tokens = [x for x in inputs if x.dim() == 3 and x.is_floating_point()]
    axes = {TokenAxis(axis, x.shape[axis]) for x in tokens for axis in (0, 1) if x.shape[axis] >= MIN_TOKENS}
    heads = [x for x in inputs if x.dim() == 4 and x.is_floating_point()] if not tokens else []
    if len(heads) > 1 and len({x.shape[:3] for x in heads}) == 1:
        axes = {TokenAxis(axis, heads[0].shape[axis]) for axis in (1, 2) if heads[0].shape[axis] >= MIN_TOKENS}
    return [axis for axis in axes if has_rounds or any(runs_along_tokens(x, axis) or cuts_tokens(x, axis) for x in picks)]


def find_unread_recurrence(frame: ModuleFrame, axes: list[TokenAxis]) -> str:
    """Return why the recurrence that a module computes along one of these axes is not read; nothing if it computes none."""
    operations = frame.list_operations()
    for tokens in axes:
        if sums_decayed_tokens(frame, operations, tokens):
            return SCAN
        if (kind := find_loop(frame, operations, tokens)) is not None:
            return LOOP if kind is LoopKind.TOKENS else CONSTANT_LOOP
        if (kind := find_rounds(frame, operations, tokens)) is not None:
            return ROUNDS if kind is LoopKind.TOKENS else CONSTANT_ROUNDS
    return ""
