"""Indices as F.one_hot writes them, matrices of zeros and ones: products with them pick tokens or sum them, as of a graph."""

import weakref

from torch import Tensor, nn

from regard.observe.interception.function_roles import Role, infer_role
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef, find_ancestors, has_tokens
from regard.observe.interception.handwritten.ancestors.layouts import skip_layouts
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct
from regard.observe.interception.handwritten.products.traces import Traces
from regard.observe.interception.plain_tensors import is_comparable
from regard.observe.interception.provenance import LEARNED, ModuleFrame
from regard.observe.interception.thread_state import choose_by_numbers


def is_one_hot(frame: ModuleFrame, x: TensorRef) -> bool:
    """Return whether the rows of a tensor are an index as F.one_hot writes it: a product with it picks or sums entries.

    A tensor that the module was given, as a buffer is, is known by its numbers.
    """
    maker, tensor = skip_layouts(frame, x), x()
    if maker is not None and frame.find_contents(x) >= LEARNED:
        return infer_role(maker.name) is Role.ONE_HOT
    return tensor is not None and not isinstance(tensor, nn.Parameter) and holds_index(tensor)


def is_made_one_hot(frame: ModuleFrame, x: TensorRef) -> bool:
    """Return whether F.one_hot made a tensor in the frame."""
    maker = skip_layouts(frame, x)
    return maker is not None and infer_role(maker.name) is Role.ONE_HOT


def holds_index(x: Tensor) -> bool:
    """Return whether each row or each column of a matrix of several is 1 at one place and 0 at all others."""
    if not is_comparable(x) or x.dim() < 2 or min(x.shape[-2:]) < 2 or not x.numel():
        return False
    x = x.detach()
    one = x[(0,) * (x.dim() - 2)]
    if not choose_by_numbers(bool(((one[0] == 0) | (one[0] == 1)).all())):
        return False  # quick, for the many other tensors
    is_binary = bool(((x == 0) | (x == 1)).all())
    return is_binary and any(bool((x.sum(dim) == 1).all()) for dim in (-1, -2))


def find_index(traces: Traces, frame: ModuleFrame, operands: list[Tensor], product: LabelledProduct | None) -> Tensor | None:
    """Return the one operand of a product that is an index as F.one_hot writes it, by which tokens are picked or summed.

    One that was not made so is none if it is multiplied with the features of the other operand, as keys are, or if nothing is
    summed, as in outer products of keys with values.
    """
    found = []
    for x in operands:
        others = [other for other in operands if other is not x]
        may_be_index = traces.find(x) is None and any(has_tokens(frame, one) for one in others)
        if may_be_index and not is_made_one_hot(frame, weakref.ref(x)) and product is not None:
            other = product.operands[1 - product.find_place(x)]
            may_be_index = bool(product.list_summed_dims(other)) and not sums_inner_axis(product, other)
        if may_be_index and is_one_hot(frame, weakref.ref(x)):
            found.append(x)
    return found[0] if len(found) == 1 else None


def sums_inner_axis(product: LabelledProduct, x: Tensor) -> bool:
    """Return whether a product sums the innermost of several dimensions of an operand x in memory, as those of features are."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    summed = product.list_summed_dims(x)
    if len(strides) < 2:
        return summed == [x.dim() - 1] and x.dim() > 1
    return any(x.stride(n) == min(strides) for n in summed)


def is_square_of_one_hot(frame: ModuleFrame, operands: list[Tensor], y: Tensor) -> bool:
    """Return whether y has as many rows as columns, and operands made from one index: one-hot tokens attend to each other."""
    if y.dim() < 2 or y.shape[-1] != y.shape[-2]:
        return False
    common = set.intersection(*(find_ancestors([frame], x) for x in operands))
    makers = [skip_layouts(frame, weakref.ref(x)) for x in operands if is_one_hot(frame, weakref.ref(x))]
    return any(maker is None or any(id(one) in common for one in maker.given) for maker in makers) and bool(common)
