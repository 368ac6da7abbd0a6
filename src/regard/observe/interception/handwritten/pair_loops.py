"""Scores that a loop computes pair by pair, as by a network of two joined tokens, and joins in a list."""

import weakref
from typing import Any

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestor_search import MAX_STEPS, TensorRef, find_meeting
from regard.observe.interception.handwritten.edge_softmax import skip_layouts
from regard.observe.interception.provenance import GATHERS, TOKEN, ModuleFrame

LISTS = {"cat", "concat", "concatenate", "stack", "hstack"}
PICKS = {*map(strip_affixes, GATHERS), "select", "narrow", "unbind", "split", "chunk", "iter"}


def may_join_scores(name: str, args: Any) -> bool:
    """Return whether a function of this name joins tensors that may be a score each, of every batch row: quick."""
    entries = args[0] if name in LISTS and args and isinstance(args[0], list | tuple) else ()
    return len(entries) > 1 and all(
        isinstance(x, Tensor) and x.is_floating_point() and not x.is_nested and (x.dim() < 2 or x.numel() == len(x))
        for x in entries
    )


def joins_scores_of_pairs(frame: ModuleFrame, entries: Any) -> bool:
    """Return whether several tensors are a score of two tokens each."""
    return all(scores_picked_pair(frame, x) for x in (entries[0], entries[-1]))


def scores_picked_pair(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether a tensor was made from two tokens with several features for each of its numbers, of which one was picked.

    A single number may have been made from two that were picked, as where a score of each token is added.
    """
    meeting, maker = find_meeting(frame, weakref.ref(x), x.numel(), passes_sums=True), skip_layouts(frame, weakref.ref(x))
    if meeting is None or maker is None or (strip_affixes(maker.name) in PICKS and maker.sizes[0] > x.numel()):
        return False  # a token that was picked is no score
    _, tokens, _ = meeting
    are_picked = [is_picked_token(frame, *one) for one in tokens]
    have_features = all(size > x.numel() for _, size in tokens)
    is_score = any(are_picked) if have_features else x.numel() == 1 and all(are_picked)
    return is_score and all(frame.find_contents(one) == TOKEN for one, _ in tokens)


def is_picked_token(frame: ModuleFrame, x: TensorRef, size: int) -> bool:
    """Return whether a tensor of this size is one of many tokens, up to functions of this one alone."""
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(x)
        if not makers or not makers[-1].given:
            return False
        maker = makers[-1]
        if maker.child is None and strip_affixes(maker.name) in PICKS and maker.sizes[0] > size:
            return True
        x, size = maker.given[0], maker.sizes[0]
    return False


def are_exponentials(frame: ModuleFrame, entries: Any) -> bool:
    """Return whether the first of several tensors is an exponential."""
    maker = skip_layouts(frame, weakref.ref(entries[0]))
    return maker is not None and maker.child is None and strip_affixes(maker.name).startswith("exp")
