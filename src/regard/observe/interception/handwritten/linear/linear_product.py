"""A product that may be linear attention: of followed scores with values, or of queries with sums of keys times values."""

from typing import NamedTuple

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, Labels
from regard.observe.interception.handwritten.products.traces import Trace
from regard.observe.interception.provenance import ModuleFrame

KERNEL = "by hand: linear attention, {}"


class LinearProduct(NamedTuple):
    """A product y of a followed tensor x with another one, which a function of this name computed in the running modules.

    Other factors of y have the labels that stand beside them.
    """

    frames: list[ModuleFrame]
    name: str
    product: LabelledProduct
    factors: list[tuple[Tensor, Labels]]
    x: Tensor
    trace: Trace
    y: Tensor

    @property
    def kernel(self) -> str:
        """The name of the call that the product completes."""
        return name_kernel(self.name)

    @property
    def place(self) -> int:
        """The place of the followed tensor among the operands."""
        return self.product.find_place(self.x)


def name_kernel(name: str) -> str:
    """Return the name of a call of linear attention that a function of this name completes."""
    return KERNEL.format(strip_affixes(name))
