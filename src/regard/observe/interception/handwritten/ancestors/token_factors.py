"""The tokens among what an operation was given: the factor of a product with weights, or what a layer projects."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.products.labelled_product import Labels, label_product
from regard.observe.interception.lookups import PRODUCTS_OF_TWO
from regard.observe.interception.provenance import TOKEN, ModuleFrame, Operation


class Factors(NamedTuple):
    """The labels of tokens, of weights and of the product of both, and the place and shape of the tokens."""

    tokens: Labels
    weights: Labels
    result: Labels
    place: int  # from the last
    shape: Sequence[int]


def find_largest(frame: ModuleFrame, maker: Operation) -> TensorRef:
    """Return the largest of what an operation was given, of tokens if there are several."""
    most = max(maker.sizes)
    largest = [one for one, size in zip(maker.given, maker.sizes, strict=True) if size == most]
    return next((one for one in largest if frame.find_contents(one) == TOKEN), largest[0])


def find_token_place(frame: ModuleFrame, maker: Operation) -> int | None:
    """Return the place, from the last, of the one factor of a product of two that holds tokens, not weights; None if not one.

    Where both may, it is the one that the module was called with.
    """
    if len(maker.given) < 2:
        return None
    tokens = [n for n in (-2, -1) if frame.find_contents(maker.given[n]) == TOKEN]
    if len(tokens) > 1:
        sources = [frame.find_sources(maker.given[n]) for n in tokens]
        tokens = [n for n, one in zip(tokens, sources, strict=True) if one is not None and one.is_passed]
    return tokens[0] if len(tokens) == 1 else None


def label_factors(frame: ModuleFrame, maker: Operation) -> Factors | None:
    """Return the labels of a product of tokens with weights over the last axis of the tokens; None for another one."""
    place = find_token_place(frame, maker) if maker.name in PRODUCTS_OF_TWO and maker.shapes is not None else None
    if place is None or maker.shapes is None:
        return None
    operands = [torch.empty(shape, device="meta") for shape in maker.shapes.given[-2:]]
    product = label_product(maker.name, operands, (maker.shapes.how, *operands), {})
    if product is None:
        return None
    n = product.find_place(operands[place])
    if not product.labels[n] or product.labels[n][-1] in product.result:
        return None
    return Factors(product.labels[n], product.labels[1 - n], product.result, place, maker.shapes.given[place])


def is_layer(maker: Operation) -> bool:
    """Return whether a module changes the last axis alone, as a layer of a class of its own does."""
    assert maker.child is not None
    if issubclass(maker.child, nn.Linear):
        return True
    if maker.shapes is None:
        return False
    given, result = maker.shapes.given[0], maker.shapes.result
    return len(maker.given) == 1 and len(given) == len(result) and given[:-1] == result[:-1] and given[-1] != result[-1]
