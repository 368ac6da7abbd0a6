"""m[b, h, i, j]: which rows an index asks for, and which of their entries, with torch's own rules of rank.

An index is applied to tensors of coordinates, which are expanded and hold one number an axis; what comes back says where
each entry of the answer lies.
"""

from typing import Any

import torch
from torch import Tensor

from regard.errors import ShapeError


def spelled_out(index: Any) -> tuple[Any, ...]:
    """An index with an entry for each of the four axes, `...` and what was left out being whole slices."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is None or (isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() > 1) for part in parts):
        raise ShapeError("a map takes ints, slices, lists, tensors and `...`; neither None nor a bool of several axes.")
    gaps = [n for n, part in enumerate(parts) if part is Ellipsis]
    if len(gaps) > 1 or len(parts) - len(gaps) > 4:
        raise ShapeError(f"a map has the four axes (b, h, q, k); got an index of {len(parts)}.")
    missing = (slice(None),) * (4 - len(parts) + len(gaps))
    return (*parts[: gaps[0]], *missing, *parts[gaps[0] + 1 :]) if gaps else (*parts, *missing)


def answer(shape: tuple[int, ...], index: tuple[Any, ...]) -> int:
    """How many numbers the answer to an index has."""
    try:
        return torch.empty(shape, device="meta")[index].numel()
    except IndexError as error:
        raise ShapeError(f"the index does not fit a map of (b, h, q, k) = {shape}: {error}.") from None


def coordinates(shape: tuple[int, ...], index: tuple[Any, ...]) -> list[Tensor]:
    """For each axis of a shape the coordinate of every entry of the answer."""
    found = []
    for axis, size in enumerate(shape):
        along = torch.arange(size).view(*(-1 if n == axis else 1 for n in range(len(shape)))).expand(shape)
        found.append(along[index])
    return found
