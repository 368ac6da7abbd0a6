"""Sums of products, entry by entry: which are of keys with values of a layer over its tokens, and what else multiplies them."""

import math
import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.function_roles import Role, infer_role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS
from regard.observe.interception.handwritten.ancestors.feature_maps import is_feature_map
from regard.observe.interception.handwritten.ancestors.product_factors import (
    USES,
    Factor,
    Use,
    expand_product,
    find_computation,
    label_factor,
    restore_factor,
)
from regard.observe.interception.handwritten.ancestors.projections import find_projection
from regard.observe.interception.handwritten.ancestors.summed_axes import are_token_labels
from regard.observe.interception.handwritten.products.labelled_product import (
    Labels,
    align_labels,
    label_entries,
    label_sum,
    label_terms,
)
from regard.observe.interception.provenance import TOKEN, ModuleFrame

SUMMED = ("sum", "mean", "cumsum")
UNITS = {"sigmoid", "silu", "gelu", "tanh"}  # which gate the values of gated linear units


class SummedProduct(NamedTuple):
    """The sum, or the running sums, of keys times values and other factors."""

    operands: tuple[Factor, Factor]
    others: tuple[Factor, ...]
    result: dict[Hashable, int]  # the sizes of its dimensions with several entries, by label
    keys: Labels  # that are summed
    is_running: bool = False
    factor: float = 1.0


def find_sum(frames: list[ModuleFrame], name: str, args: Any, kwargs: Any) -> SummedProduct | None:
    """Return the products of keys with values that a sum of this name adds up over tokens; None if it is another one."""
    core = strip_affixes(name)
    if core not in SUMMED or not args or not isinstance(args[0], Tensor) or args[0].is_nested:
        return None
    x, is_running = args[0], core == "cumsum"
    factors, has_number = list_factors(frames, x)
    found = find_operands(frames, factors, x.numel()) if len(factors) > 1 else None
    summed = None if found is None else label_sum(label_entries(x, x), "sum" if is_running else name, args[:2], kwargs)
    if found is None or summed is None:
        return None
    restored = (restore_factor(frames[-1], one) for one in factors)
    factors = [one._replace(labels=label_factor(one, x)) for one in restored]
    several = [n for n, size in enumerate(x.shape) if size > 1]
    result: dict[Hashable, int] = {n: x.shape[n] for n in several if is_running or n in summed.result}
    keys: Labels = [n for n in several if n not in summed.result]
    product = build_product(factors, found, result, keys)._replace(is_running=is_running, factor=summed.factor)
    if not sums_tokens_alone(frames, product, x):
        return None
    return product._replace(factor=product.factor * find_number(product, x)) if has_number else product


def find_einsum(frames: list[ModuleFrame], args: Any) -> SummedProduct | None:
    """Return the products of keys with values that an einsum adds up over tokens; None if it is another one."""
    operands = args[1:]
    if not isinstance(args[0], str) or len(operands) < 2 or not all(is_dense(one) for one in operands):
        return None
    labels, of_result = label_terms(args[0], operands)
    every = {label for one in labels for label in one}
    if every <= {*of_result} or sum({*one} == every for one in labels) < 2:
        return None
    sizes: dict[Hashable, int] = {}
    factors = []
    for x, one in zip(operands, labels, strict=True):
        own = [label if size > 1 else None for label, size in zip(one, x.shape, strict=True)]
        factors.append(Factor(weakref.ref(x), x.numel(), labels=own))
        sizes |= {label: size for label, size in zip(one, x.shape, strict=True) if size > 1}
    found = find_operands(frames, factors, math.prod(sizes.values()))
    if found is None or operands[found[0]] is operands[found[1]]:
        return None
    result = {label: sizes[label] for label in of_result if label in sizes}
    product = build_product(factors, found, result, [label for label in sizes if label not in result])
    return product if sums_tokens_alone(frames, product, operands[found[1]]) else None


def build_product(factors: list[Factor], found: tuple[int, int], result: dict[Hashable, int], keys: Labels) -> SummedProduct:
    """Return the sum over labels of the product of factors, of which keys and values have the places that were found."""
    others = (one for n, one in enumerate(factors) if n not in found)
    return SummedProduct((factors[found[0]], factors[found[1]]), (*others,), result, keys)


def is_dense(x: Any) -> bool:
    """Return whether a value is a tensor of floating-point numbers that is not nested."""
    return isinstance(x, Tensor) and x.is_floating_point() and not x.is_nested


def list_factors(frames: list[ModuleFrame], x: Tensor) -> tuple[list[Factor], bool]:
    """Return the factors of the product that a tensor is, in another layout or dtype or not, and whether a number is one too.

    One that was freed may be a product of factors itself, and so may keys times values beside weights. None if it is none.
    """
    factors, has_number = expand_product(frames[-1], Factor(weakref.ref(x), x.numel()))
    for _ in range(MAX_STEPS):
        for place, one in enumerate(factors):
            parts, multiplies = expand_product(frames[-1], one) if one.use is Use.MULTIPLY else ([], False)
            others = factors[:place] + factors[place + 1 :]
            if parts and (restore_factor(frames[-1], one).tensor() is None or multiplies_keys(frames, parts, others)):
                factors, has_number = [*factors[:place], *parts, *factors[place + 1 :]], has_number or multiplies
                break
        else:
            break
    return factors, has_number


def multiplies_keys(frames: list[ModuleFrame], parts: list[Factor], others: list[Factor]) -> bool:
    """Return whether parts are keys and values that were not freed, and no other factor of their size is one of a layer too.

    None of them is a feature map: a gated linear unit is one tensor.
    """
    if len(parts) != 2 or any(one.tensor() is None or one.size != parts[0].size for one in parts):
        return False
    wholes = [one for one in others if one.size == parts[0].size and one.use is Use.MULTIPLY and is_of_layer(frames, one)]
    are_layers = all(is_of_layer(frames, one) and is_plain(frames, one) for one in parts)
    return are_layers and not any(is_plain(frames, one) for one in wholes)


def find_operands(frames: list[ModuleFrame], factors: list[Factor], size: int) -> tuple[int, int] | None:
    """Return the places of keys and values of this size among factors; None if there are no two that layers have made.

    Values are the last of them that is no feature map, such as a softmax over tokens.
    """
    layers = [n for n, one in enumerate(factors) if one.size == size and one.use is Use.MULTIPLY and is_of_layer(frames, one)]
    if len(layers) < 2:
        return None
    plain = [n for n in layers if is_plain(frames, factors[n])]
    values = (plain or layers)[-1]
    return next(n for n in layers if n != values), values


def is_of_layer(frames: list[ModuleFrame], factor: Factor) -> bool:
    """Return whether a layer has made a factor, changed entry by entry or normed, or a softmax has."""
    return is_softmax(frames[-1], factor) or find_projection(frames, factor.tensor) is not None


def is_plain(frames: list[ModuleFrame], factor: Factor) -> bool:
    """Return whether no softmax or other feature map made a factor."""
    return not is_softmax(frames[-1], factor) and not is_feature_map(frames, (factor.tensor, factor.size))


def is_softmax(frame: ModuleFrame, factor: Factor) -> bool:
    """Return whether a softmax has made a factor."""
    maker = find_computation(frame, factor.tensor, factor.size)
    return maker is not None and infer_role(maker.name) is Role.SOFTMAX


def is_gate(frame: ModuleFrame, factor: Factor) -> bool:
    """Return whether a factor is that of a gated linear unit, which no keys or values are."""
    maker = find_computation(frame, factor.tensor, factor.size)
    return factor.function in UNITS or (maker is not None and strip_affixes(maker.name) in UNITS)


def is_centered(frame: ModuleFrame, factor: Factor) -> bool:
    """Return whether a tensor is another one minus a mean of it, scaled or not."""
    maker = find_computation(frame, factor.tensor, factor.size)
    while (
        maker is not None
        and strip_affixes(maker.name) in USES
        and maker.sizes[0] == factor.size > max(maker.sizes[1:], default=0)
    ):
        maker = find_computation(frame, maker.given[0], factor.size)
    if maker is None or strip_affixes(maker.name) not in ("sub", "subtract") or len(maker.given) != 2:
        return False
    mean = find_computation(frame, maker.given[1], maker.sizes[1])
    return mean is not None and strip_affixes(mean.name) == "mean" and mean.given[0] is maker.given[0]


def find_number(product: SummedProduct, x: Tensor) -> float:
    """Return the number that multiplied a product of tensors to x, from its largest entry; 1 if one was freed, or all are 0."""
    found = x.new_ones(x.shape, dtype=torch.float64)
    for one in (*product.operands, *product.others):
        if one.tensor() is None or one.labels is None:
            return 1.0
        by = align_labels(*one.read(), [*range(x.dim())]).double()
        found = found / by if one.use is Use.DIVIDE else found * by
    place = found.abs().nan_to_num().argmax()
    largest = float(found.flatten()[place])
    return float(x.detach().flatten()[place]) / largest if math.isfinite(largest) and largest else 1.0


def sums_tokens_alone(frames: list[ModuleFrame], product: SummedProduct, x: Tensor) -> bool:
    """Return whether a sum of products x is over the tokens of a module's input, and no covariance or mean of gated units."""
    if not product.keys or any(frames[-1].find_contents(one.tensor) != TOKEN for one in product.operands):
        return False
    found = []
    for one in product.operands:
        tensor = one.tensor()
        layout, labels = (x, [*range(x.dim())]) if tensor is None or one.labels is None else (tensor, one.labels)
        found.append(are_token_labels(frames, one.tensor, layout, labels, product.keys, product.is_running))
    if False in found or not any(found) or any(is_gate(frames[-1], one) for one in product.operands):
        return False
    return not all(is_centered(frames[-1], one) for one in product.operands)
