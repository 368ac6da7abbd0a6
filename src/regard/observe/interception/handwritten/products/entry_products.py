"""Products of two tensors entry by entry, and what they are multiplied by, until they are summed or freed."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.handwritten.products.labelled_product import LabelledProduct, Labels, label_entries
from regard.observe.interception.handwritten.products.score_form import PRODUCTS, QUOTIENTS
from regard.observe.interception.provenance import is_in_place

Factors = list[tuple[Tensor, Labels]]  # that broadcast to a product, with the labels of their dimensions


class EntryProduct(NamedTuple):
    """Two tensors that were multiplied entry by entry, and factors of their product."""

    product: LabelledProduct
    factors: Factors

    def multiply(self, by: Tensor | float) -> "EntryProduct | None":
        """Return the product times a number or a tensor that broadcasts to it; None if it has more dimensions."""
        if not isinstance(by, Tensor):
            return self._replace(product=self.product._replace(factor=self.product.factor * by))
        if by.dim() > len(self.product.result):
            return None
        own = self.product.result[len(self.product.result) - by.dim() :]
        labels = [label for label, size in zip(own, by.shape, strict=True) if size > 1]
        return self._replace(factors=[*self.factors, (by.squeeze(), labels)])


class EntryProducts:
    """The products of a forward by their result, each as one product of two tensors or several: (a b) c is (a b) and c too."""

    def __init__(self) -> None:
        self.products = WeakTensorKeyDictionary()

    def clear(self) -> None:
        """Forget all products."""
        self.products.clear()

    def find(self, x: Any) -> list[EntryProduct]:
        """Return the products that a value is, the likeliest first; none if it is not the result of any."""
        found: list[EntryProduct] = self.products.get(x, []) if len(self.products) and isinstance(x, Tensor) else []
        return found

    def can_add(self, args: Any, y: Tensor) -> bool:
        """Return whether the result y of a multiplication may be a product, though none of its arguments is followed."""
        return is_outer_product(args, y) or (len(self.products) > 0 and any(map(self.find, args[:2])))

    def put(self, y: Tensor, product: LabelledProduct) -> None:
        """Store the product that y is."""
        self.products[y] = [EntryProduct(product, [])]

    def add(self, name: str, args: Any, y: Tensor) -> None:
        """Store what an entrywise function multiplied to y: its arguments, and the products that these are, times a factor.

        A tensor that was written into has lost its numbers, and is no operand.
        """
        core = strip_affixes(name)
        if core not in PRODUCTS | QUOTIENTS or len(args) != 2:
            return
        found = []
        for x, by in (args, args[::-1]) if core in PRODUCTS else (args,):
            before = self.find(x)
            if before:
                by = by.detach().to(y.dtype) if isinstance(by, Tensor) else by
                found += [one.multiply(by if core in PRODUCTS else 1 / by) for one in before]
        are_tensors = core in PRODUCTS and all(isinstance(x, Tensor) for x in args)
        if are_tensors and not is_in_place(name) and is_outer_product(args, y):
            found.append(EntryProduct(label_entries(*args), []))
        if found or self.find(y):
            self.products[y] = [one for one in found if one is not None]


def is_outer_product(args: Any, y: Tensor) -> bool:
    """Return whether y has more entries than each of two tensors that were multiplied entry by entry."""
    return isinstance(args[-1], Tensor) and y.dim() > 2 and max(map(Tensor.numel, args)) < y.numel()
