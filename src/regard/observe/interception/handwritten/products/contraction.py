"""Products that sum over an axis: which tensors they multiply, and whether several rows of weights share the values."""

from typing import Any

from torch import Tensor

from regard.observe.interception.function_roles import strip_affixes
from regard.observe.interception.tensor_arguments import find_tensors

ADDING_PRODUCTS = ("addmm", "addmv", "addbmm", "baddbmm", "sspaddmm")  # add to their first argument


def find_operands(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a product multiplies, without its bias and its output."""
    core = strip_affixes(name)
    tensors = find_tensors(args, {name: x for name, x in kwargs.items() if name not in ("out", "bias", "input")})
    if "input" in kwargs and core not in ADDING_PRODUCTS:
        tensors.insert(0, kwargs["input"])
    if core in ADDING_PRODUCTS and args:
        tensors = tensors[1:]
    return [x for x in (tensors[:2] if core == "linear" else tensors) if x.is_floating_point()]


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
