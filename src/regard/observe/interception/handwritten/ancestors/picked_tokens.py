"""Tokens that a module picked by their scores, whose softmax weighs them, as in top-k pooling: which of all they are."""

import weakref
from typing import NamedTuple

from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.ancestors.ancestor_search import CHOOSES, MAX_STEPS, find_ancestors, walk_back
from regard.observe.interception.handwritten.ancestors.layouts import is_layout
from regard.observe.interception.handwritten.ancestors.token_factors import find_largest, is_layer
from regard.observe.interception.provenance import ModuleFrame, Operation


class PickedTokens(NamedTuple):
    """The places (n,) or (b, n) of picked tokens among all, of which there are `total`; None if they are not known."""

    places: Tensor | None
    total: int


def find_picked_tokens(frame: ModuleFrame, weights: Tensor, values: Tensor) -> PickedTokens | None:
    """Return which tokens values are of, if an index picked them by the scores that weights were made of; else None."""
    chosen = set[int]()
    for *_, makers in walk_back([frame], (weakref.ref(weights), 0), lambda maker, *_: maker.child is None):
        for maker in makers:
            if maker.name in CHOOSES or maker.name == "argsort":
                chosen |= {id(one) for one in maker.results[maker.name != "argsort" :]}
    x, keeps_order = weakref.ref(values), True
    for _ in range(MAX_STEPS if chosen else 0):
        makers = [one for one in frame.find_makers(x) if one.given and one.given[0] is not x]
        if not makers:
            break
        lookup = makers[-1].lookup
        if lookup is not None:
            is_chosen = any(chosen & find_ancestors([frame], one) for one in lookup.given)
            places = lookup.read_index() if keeps_order and not lookup.has_changed else None
            return PickedTokens(places, lookup.size) if is_chosen else None
        x, keeps_order = find_largest(frame, makers[-1]), keeps_order and keeps_rows(makers[-1])
    return None


def keeps_rows(maker: Operation) -> bool:
    """Return whether an operation leaves the tokens in their order, as a layer does that changes the features of each."""
    is_of_entries = infer_role(maker.name) in (Role.NONLINEAR, Role.ADD, Role.MULTIPLY)
    return maker.name == "linear" or is_of_entries or is_layout(maker) or (maker.child is not None and is_layer(maker))
