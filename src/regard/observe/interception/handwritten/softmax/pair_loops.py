"""Scores that a loop computes pair by pair, as by a network of two joined tokens, and joins in a list."""

import weakref
from typing import Any

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS, TensorRef, walk_back
from regard.observe.interception.handwritten.ancestors.layouts import is_layout, skip_layouts
from regard.observe.interception.handwritten.ancestors.token_pairs import find_meeting
from regard.observe.interception.handwritten.softmax.divided_exponentials import find_exponential
from regard.observe.interception.lookups import JOINS_PARTS
from regard.observe.interception.operation_details import GATHERS
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation

LISTS = JOINS_PARTS | {"hstack"}
GATES = {"exp", "exp2", "sigmoid", "special_expit"}  # which turn each score into a weight, unlike what a softmax follows
ENTRY_PICKS = {*map(strip_affixes, GATHERS), "select", "narrow", "unbind", "split", "chunk", "iter"}


def may_join_scores(name: str, args: Any) -> bool:
    """Return whether a function of this name joins tensors that may be a score each, of every batch row: quick."""
    entries = args[0] if name in LISTS and args and isinstance(args[0], list | tuple) else ()
    return len(entries) > 1 and all(
        isinstance(x, Tensor) and x.is_floating_point() and not x.is_nested and (x.dim() < 2 or x.numel() == len(x))
        for x in entries
    )


def joins_scores_of_pairs(frame: ModuleFrame, entries: Any) -> bool:
    """Return whether several tensors are a score of two tokens each."""
    return all(scores_picked_pair(frame, weakref.ref(x), x.numel()) for x in (entries[0], entries[-1]))


def scores_picked_pair(frame: ModuleFrame, x: TensorRef, entries: int) -> bool:
    """Return whether a tensor of this many entries was made from two tokens, of which one was picked among many.

    Each has several features for each entry. A single number may have been made from two that were picked, as where a score of
    each token is added.
    """
    meeting, maker = find_meeting(frame, x, entries, passes_sums=True), skip_layouts(frame, x)
    if meeting is None or maker is None or (strip_affixes(maker.name) in ENTRY_PICKS and maker.sizes[0] > entries):
        return False  # a token that was picked is no score
    _, tokens, _ = meeting
    are_picked = [is_picked_token(frame, *one) for one in tokens]
    have_features = all(size > entries for _, size in tokens)
    is_score = any(are_picked) if have_features else entries == 1 and all(are_picked)
    return is_score and all(frame.find_contents(one) == TOKEN for one, _ in tokens)


def is_picked_token(frame: ModuleFrame, x: TensorRef, size: int) -> bool:
    """Return whether a tensor of this size is one of many tokens, up to functions of this one alone."""
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(x)
        if not makers or not makers[-1].given:
            return False
        maker = makers[-1]
        if maker.child is None and strip_affixes(maker.name) in ENTRY_PICKS and maker.sizes[0] > size:
            return True
        x, size = maker.given[0], maker.sizes[0]
    return False


def find_gate(frame: ModuleFrame, x: Tensor) -> str:
    """Return the name of the exponential or sigmoid that a tensor is; nothing for another one."""
    maker = skip_layouts(frame, weakref.ref(x))
    name = "" if maker is None else strip_affixes(maker.name)
    return name if name in GATES else ""


def divides_by_loop(frame: ModuleFrame, x: Tensor, sums: Tensor) -> bool:
    """Return whether a loop added up exponentials of scores of two tokens to `sums`, and x is one or values times all."""
    weighted, own = ({id(one.given[0]): one for one in list_exponentials(frame, weakref.ref(part))} for part in (x, sums))
    if len(own) < 2 or not weighted.keys() <= own.keys():
        return False
    return any(scores_picked_pair(frame, one.given[0], one.sizes[0]) for one in weighted.values())


def list_exponentials(frame: ModuleFrame, x: TensorRef) -> list[Operation]:
    """Return the exponentials that were added up to a tensor, times values or not."""
    found = []
    for _, (one, _), makers in walk_back([frame], (x, 0), lambda maker, *_: is_part_of_sum(maker)):
        maker = None if any(map(is_part_of_sum, makers)) else find_exponential(frame, one)
        found += [] if maker is None else [maker]
    return found


def is_part_of_sum(maker: Operation) -> bool:
    """Return whether an operation adds to a sum, a number or a tensor, changes its layout, or writes it into another tensor."""
    return maker.child is None and (is_layout(maker) or strip_affixes(maker.name) in ("add", "setitem"))
