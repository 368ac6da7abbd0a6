"""Scores that are no product: a number of each of two tokens, or of a token and of a place, as how far a window is from it."""

import weakref

from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS, find_ancestors
from regard.observe.interception.handwritten.ancestors.layouts import is_layout
from regard.observe.interception.handwritten.ancestors.token_pairs import count_before_repeats
from regard.observe.interception.handwritten.products.contraction import is_shared
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.provenance import TOKEN, ModuleFrame
from regard.observe.interception.thread_state import choose_by_numbers

BY_ENTRY = (Role.NONLINEAR, Role.POWER, Role.MULTIPLY, Role.ADD)
NEGATES = ("neg", "__neg__", "neg_")
SUM = "a sum"  # that made the scores


def count_functions_of_sum(frame: ModuleFrame, x: Tensor) -> int | None:
    """Return how many functions made x of a sum of tokens and a table, or of two, broadcast against each other; None if no sum.

    They are functions of each entry. The sum may be a difference of tokens and a table; that of running sums is a decay.
    """
    one, size = weakref.ref(x), x.numel()
    for count in range(MAX_STEPS):
        maker = next(reversed(frame.find_makers(one)), None)
        if maker is None or maker.child is not None or not maker.sizes:
            return None
        role = infer_role(maker.name)
        if role is Role.ADD and max(maker.sizes) < size:
            are_tokens = {frame.find_contents(given) == TOKEN for given in maker.given}
            is_pair = are_tokens == {True} and len(maker.given) == 2 and strip_affixes(maker.name) == "add"
            return count if is_pair or len(are_tokens) == 2 else None
        if role not in BY_ENTRY and maker.name not in NEGATES and not is_layout(maker):
            return None
        size = max(maker.sizes)
        one = maker.given[maker.sizes.index(size)]
    return None


def gates_entries(frame: ModuleFrame, trace: Trace, weights: Tensor, x: Tensor) -> bool:
    """Return whether functions of a sum multiply each entry of x by its own number, as gates of channels and places do.

    Values are shared by rows of weights. Other tensors of as many entries may be masks, unless gates of channels multiply them
    or both were made of the same tokens; a tensor of zeros and ones is a mask.
    """
    if trace.changes[:1] != (SUM,) or x.numel() != weights.numel() or is_shared(weights, x, 0):
        return False
    if frame.find_contents(weakref.ref(x)) < TOKEN or count_before_repeats(frame, weakref.ref(x), x.numel()) < x.numel():
        return False
    has_same = trace.is_by_channel or not find_ancestors([frame], x).isdisjoint(find_ancestors([frame], weights))
    return has_same and choose_by_numbers(not bool(((x == 0) | (x == 1)).all()))
