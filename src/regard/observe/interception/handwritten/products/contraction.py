"""Products that sum over an axis: which tensors they multiply, and whether several rows of weights share the values."""

from typing import Any, NamedTuple

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.tensor_arguments import find_tensors

ADDING_PRODUCTS = ("addmm", "addmv", "addbmm", "baddbmm", "sspaddmm")  # add to their first argument
BY_ROWS = ("linear", "inner")  # multiply both along their last axis
MATRICES = {"matmul", "rmatmul", "mm", "bmm", "mv", "dot", *ADDING_PRODUCTS, *BY_ROWS}


class ProductAxes(NamedTuple):
    """Whether weights have several rows for the same values, and the length of the summed axis; None if unknown."""

    shared: bool
    summed: int | None


UNKNOWN = ProductAxes(True, None)


def find_operands(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a product multiplies, without its bias and its output."""
    core = strip_affixes(name)
    tensors = find_tensors(args, {name: x for name, x in kwargs.items() if name not in ("out", "bias", "input")})
    if "input" in kwargs and core not in ADDING_PRODUCTS:
        tensors.insert(0, kwargs["input"])
    if core in ADDING_PRODUCTS and args:
        tensors = tensors[1:]
    return [x for x in (tensors[:2] if core == "linear" else tensors) if x.is_floating_point()]


def find_axes(name: str, args: Any, operands: list[Tensor], weights: Tensor) -> ProductAxes:
    """Return what a product does along the axes of the weights among its operands."""
    core = strip_affixes(name)
    if core == "einsum":
        return find_axes_of_einsum(args, operands, weights)
    if len(operands) != 2 or core not in MATRICES:
        return UNKNOWN
    first = weights is operands[0]
    if weights.dim() < 2:
        return ProductAxes(False, weights.shape[-1] if weights.dim() else None)
    if first or core in BY_ROWS:
        return ProductAxes(weights.shape[-2] > 1, weights.shape[-1])
    return ProductAxes(weights.shape[-1] > 1, weights.shape[-2])


def find_axes_of_einsum(args: Any, operands: list[Tensor], weights: Tensor) -> ProductAxes:
    """Return what an einsum does along the axes of the weights among its operands.

    UNKNOWN if the equation is given by numbers or has no arrow.
    """
    if not args or not isinstance(args[0], str) or "->" not in args[0]:
        return UNKNOWN
    left, right = args[0].replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return UNKNOWN
    place = next(n for n, x in enumerate(operands) if x is weights)
    sizes = find_sizes(terms[place], weights)
    others = set("".join(term for n, term in enumerate(terms) if n != place))
    shared = any(size > 1 for letter, size in sizes.items() if letter in right and letter not in others)
    summed = [size for letter, size in sizes.items() if letter not in right]
    return ProductAxes(shared, summed[0] if len(summed) == 1 else None)


def find_sizes(term: str, x: Tensor) -> dict[str, int]:
    """Return the size of each letter of an einsum term, before and after an ellipsis."""
    before, _, after = term.partition("...")
    sizes = dict(zip(before, x.shape, strict=False))
    return sizes | dict(zip(reversed(after), reversed(x.shape), strict=False))


def is_shared(weights: Tensor, values: Tensor, extent: int) -> bool:
    """Return whether an entrywise product has several rows of weights, each `extent` long, for the same values."""
    sizes = [find_own_sizes(x) for x in (weights, values)]
    length = max(map(len, sizes))
    pairs = list(zip(*([1] * (length - len(one)) + one for one in sizes), strict=True))
    along = any(w == extent and v > 1 for w, v in pairs)
    return any(w > 1 and v == 1 for w, v in pairs) and (along or not extent)


def find_own_sizes(x: Tensor) -> list[int]:
    """Return the size of each axis, 1 for an axis along which the tensor is expanded."""
    return [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
