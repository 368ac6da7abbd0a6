"""Outer products, such as those of a key with a value that a loop adds to its state, as products of views of their shape."""

import weakref
from typing import Any

import torch
from torch import Tensor

from regard.map.computed_bias import drop_repeated_axes
from regard.mechanism.scores import score_dtype
from regard.observe.interception.function_roles import Role, strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import MAX_STEPS, has_tokens, is_end
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, Labels, align_labels, label_terms
from regard.observe.interception.handwritten.products.tensor_axes import Dims
from regard.observe.interception.handwritten.recurrences.state_loop import (
    Factor,
    Product,
    ReadTrace,
    Sources,
    State,
    Trace,
)
from regard.observe.interception.handwritten.softmax.pair_loops import ENTRY_PICKS
from regard.observe.interception.lookups import IS_TENSOR, read_version
from regard.observe.interception.provenance import ModuleFrame

OUTER = {"outer", "ger"}


def is_outer_product(role: Role | None, name: str, args: Any, y: Any) -> bool:
    """Return whether y may be an outer product of tensors, with more entries than each: quick."""
    if role is Role.MULTIPLY:
        tensors = args
    elif role is Role.PRODUCT and args:
        is_column = isinstance(args[0], Tensor) and not args[0].is_nested and args[0].shape[-1:] == (1,)
        tensors = args[1:] if name == "einsum" else args if is_column else ()
    else:
        return name in OUTER
    return (
        len(tensors) > 1
        and isinstance(y, Tensor)
        and y.dim() > 1
        and all(map(IS_TENSOR, tensors))
        and max(map(Tensor.numel, tensors)) < y.numel()
    )


def is_of_one_token(frame: ModuleFrame, x: Tensor) -> bool:
    """Return whether an index picked one token of each batch row, which x was made of entry by entry: its rows are features."""
    lengths, one = frame.list_lengths(), weakref.ref(x)
    for _ in range(MAX_STEPS):
        makers = frame.find_makers(one)
        if not makers or is_end(makers[-1]) or not makers[-1].given:
            return False
        maker = makers[-1]
        if maker.along is not None and strip_affixes(maker.name) in ENTRY_PICKS:
            axis, shape = maker.along
            if shape[axis] in lengths and len(shape) > 2:
                return True
        one = maker.given[maker.sizes.index(max(maker.sizes))]
    return False


def add_sources(product: Product, frame: ModuleFrame, factors: Any, traces: dict[int, Trace]) -> Product:
    """Return a product with what is known of the tensors that it is of: how many depend on tokens, and which they are."""
    count = count_token_factors(frame, factors, traces)
    return product._replace(token_factors=count, sources=list_sources(factors, traces))


def count_token_factors(frame: ModuleFrame, factors: Any, traces: dict[int, Trace]) -> int:
    """Return the number of factors, and of those of products among them, that depend on tokens."""
    found = [(x, traces.get(id(x))) for x in factors if isinstance(x, Tensor)]
    return sum(one.token_factors if isinstance(one, Product) else int(has_tokens(frame, x)) for x, one in found)


def list_sources(factors: Any, traces: dict[int, Trace]) -> Sources:
    """Return the tensors among factors, and the sources of those of products among them."""
    found = [(x, traces.get(id(x))) for x in factors if isinstance(x, Tensor)]
    own = (one.sources if isinstance(one, Product) else (weakref.ref(x),) for x, one in found)
    return tuple(one for sources in own for one in sources)


def can_view(x: Tensor, y: Tensor) -> bool:
    """Return whether x has a view of the shape of y."""
    try:
        x.view(y.shape)
    except RuntimeError:
        return False
    return True


def multiply_entries(args: Any, traces: dict[int, Trace], y: Tensor) -> Product | None:
    """Return the product y of two values entry by entry; None if neither is a product and y is no outer product."""
    pairs = [(x, traces.get(id(x))) for x in args]
    products = [one for _, one in pairs if isinstance(one, Product) and not one.is_exponential]
    if any(isinstance(one, State | ReadTrace) for _, one in pairs):
        return None
    if not products and not is_outer_product(Role.MULTIPLY, "mul", args, y):
        return None
    factors: list[Any] = [x for one in products for x in one.factors]  # first: what multiplies a product stands behind them
    factors += [x for x, one in pairs if not any(one is product for product in products)]
    return join_factors([expand_value(x, y) for x in factors], products)


def multiply_operands(
    operands: list[Tensor], labels: list[Labels], result: Labels, traces: dict[int, Trace], y: Tensor
) -> Product | None:
    """Return the product y of operands with labels; None if it sums several entries, or is no outer product."""
    is_outer = max(map(Tensor.numel, operands), default=0) < y.numel()
    if len(labels) != len(operands) or not (is_outer or any(id(x) in traces for x in operands)):
        return None
    factors, products = [], []
    for x, own in zip(operands, labels, strict=True):
        trace = traces.get(id(x))
        summed = [n for n, label in enumerate(own) if label not in result]
        if isinstance(trace, State | ReadTrace) or any(x.shape[n] > 1 for n in summed):
            return None
        is_product = isinstance(trace, Product) and not trace.is_exponential
        products += [trace] if isinstance(trace, Product) and is_product else []
        kept = [label for label in own if label in result]
        for one in trace.factors if isinstance(trace, Product) and is_product else (x,):
            factors.append(align_labels(one.squeeze(tuple(summed)) if summed else one, kept, result).expand(y.shape))
    return join_factors(factors, products)


def join_factors(factors: list[Tensor], products: list[Product]) -> Product | None:
    """Return the product of factors, those of some products among them; None if two of these are corrected."""
    corrections = [one.correction for one in products if one.correction is not None]
    return Product(tuple(factors), correction=next(iter(corrections), None)) if len(corrections) < 2 else None


def label_operands(
    product: LabelledProduct | None, core: str, args: Any, operands: list[Tensor]
) -> tuple[list[Labels], Labels]:
    """Return the labels of the operands of a product and of its result; none if they are not known."""
    if core in OUTER:
        return [["row"], ["column"]], ["row", "column"]
    if core == "einsum" and isinstance(args[0], str):
        return label_terms(args[0], operands)
    return ([*product.labels], product.result) if product is not None else ([], [])


def multiply_by_number(product: Product, number: float, y: Tensor) -> Product:
    """Return a product times a number."""
    return product if number == 1 else product._replace(factors=(*product.factors, expand_value(number, y)))


def expand_value(x: Any, y: Tensor) -> Tensor:
    """Return a view of a tensor or number with the shape of y."""
    x = x if isinstance(x, Tensor) else torch.tensor(float(x), dtype=score_dtype(y.dtype), device=y.device)
    expanded: Tensor = x.expand(y.shape)
    return expanded


def read_factor(x: Tensor, dims: Dims) -> Factor:
    """Return a tensor with these axes without those that it is expanded along."""
    own = drop_repeated_axes(x if torch.is_grad_enabled() else x.detach())
    return Factor(own, tuple(axes if size > 1 else () for axes, size in zip(dims, own.shape, strict=True)), read_version(own))
