"""The two tensors whose product, entry by entry, a tensor is: one that was freed is cut again out of what it was cut of."""

import weakref

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.ancestors.ancestor_search import TensorRef
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, label_entries
from regard.observe.interception.handwritten.products.score_form import PRODUCTS
from regard.observe.interception.provenance import ModuleFrame


def find_factors(frame: ModuleFrame, x: Tensor) -> LabelledProduct | None:
    """Return the product of two tensors that x is, entry by entry; None for other tensors, or if a factor is lost."""
    makers = frame.find_makers(weakref.ref(x))
    if len(makers) != 1 or makers[0].child is not None or strip_affixes(makers[0].name) not in PRODUCTS:
        return None
    factors = [restore_cut(frame, one) for one in makers[0].given]
    a, b = (*factors, None, None)[:2] if len(factors) == 2 else (None, None)
    return None if a is None or b is None else label_entries(a, b)


def restore_cut(frame: ModuleFrame, ref: TensorRef) -> Tensor | None:
    """Return a tensor, cut again by slices and numbers and logged if it was freed; None if what it was cut of was freed too."""
    x, makers = ref(), frame.find_makers(ref)
    if x is not None or len(makers) != 1:
        return x
    maker = makers[0]
    given = maker.given[0]() if maker.name == "__getitem__" and maker.shapes is not None else None
    if given is None or maker.shapes is None:
        return None
    x = given.detach()[maker.shapes.how]
    frame.log_operation((given, maker.shapes.how), {}, x, maker.name)
    return x
