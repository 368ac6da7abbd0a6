"""m[b, h, i, j]: the rows that an index selects, and the entries of them, with torch's own rules of rank.

An index is applied to tensors of coordinates, which are expanded and store one number an axis; the result holds the
coordinates of each entry of the answer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, OutOfRangeError, ShapeError
from regard.mechanism.arguments import LARGEST_POSITION, check_integer, describe_value

INDEX_DTYPES = (torch.int64, torch.int32, torch.bool)  # dtypes of an index tensor


def expand_index(index: Any) -> tuple[Any, ...]:
    """Expand an index to one entry for each of the four axes, with whole slices for `...` and for what was left out.

    Tensors are moved to the CPU, where the coordinates are.
    """
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if part is None or (isinstance(part, Tensor) and part.dtype == torch.bool and part.dim() > 1):
            raise ShapeError(
                "the index of a map must be ints, slices, lists, tensors or `...`, not None or bools of several axes."
            )
        check_index("an index of a map", part)
    parts = tuple(part.cpu() if isinstance(part, Tensor) else part for part in parts)
    gaps = [n for n, part in enumerate(parts) if part is Ellipsis]
    if len(gaps) > 1 or len(parts) - len(gaps) > 4:
        raise ShapeError(f"a map has the four axes (b, h, q, k); got an index of {len(parts)}.")
    missing = (slice(None),) * (4 - len(parts) + len(gaps))
    return (*parts[: gaps[0]], *missing, *parts[gaps[0] + 1 :]) if gaps else (*parts, *missing)


def count_entries(shape: tuple[int, ...], index: tuple[Any, ...]) -> int:
    """Count the numbers in the result of an index."""
    for part, size, axis in zip(index, shape, "bhqk", strict=True):
        check_index(f"an index along {axis}", part, size)
    try:
        return torch.empty(shape, device="meta")[index].numel()
    except (IndexError, RuntimeError) as error:
        raise ShapeError(f"the index does not fit a map of (b, h, q, k) = {shape}: {error}.") from None


def coordinates(shape: tuple[int, ...], index: tuple[Any, ...]) -> list[Tensor]:
    """Compute, for each axis of a shape, the coordinate of every entry of the result."""
    found = []
    for axis, size in enumerate(shape):
        along = torch.arange(size, device="cpu").view(*(-1 if n == axis else 1 for n in range(len(shape)))).expand(shape)
        found.append(along[index])
    return found


def group_pairs(b: Tensor, h: Tensor, heads: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield each batch row and head among the coordinates of entries, with the places (n,) of its entries."""
    pairs = (b * heads + h).reshape(-1)
    for pair in pairs.unique().tolist():
        yield *divmod(pair, heads), (pairs == pair).nonzero().squeeze(-1)


def check_index(name: str, index: Any, size: int | None = None) -> None:
    """Raise ConfigError for an invalid index of an axis, and OutOfRangeError for a place outside an axis of this size."""
    if isinstance(index, slice):
        return check_slice(name, index)
    if index is Ellipsis:
        return None
    if type(index) is int:
        return check_ends(name, index, index, size)
    try:
        found = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.empty(1)
    is_plain = found.layout is torch.strided and not found.is_nested and found.device.type != "meta"
    if not is_plain or isinstance(index, bool) or (found.dtype not in INDEX_DTYPES and found.numel()):
        raise ConfigError(f"{name} must be an int, a slice, or a list or tensor of ints or bools; got {describe_value(index)}.")
    if found.dtype == torch.bool:
        if found.dim() != 1 or size not in (None, len(found)):
            raise OutOfRangeError(f"{name} has {tuple(found.shape)} bools, but an axis of {size} places needs one for each.")
    elif found.numel():
        check_ends(name, int(found.min()), int(found.max()), size)
    return None


def check_ends(name: str, least: int, greatest: int, size: int | None) -> None:
    """Raise OutOfRangeError if the least or the greatest place is outside an axis of this size."""
    if size is not None and not -size <= least <= greatest < size:
        wrong = describe_value(least if least < -size else greatest)
        raise OutOfRangeError(
            f"{name} is out of range: got {wrong}, but the axis has {f'0 to {size - 1}' if size else 'no places'}."
        )


def check_slice(name: str, part: slice) -> None:
    """Raise ConfigError if a slice is not of integers or its step is below 1."""
    try:
        is_right = part.indices(1)[2] > 0
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        ends = ", ".join(map(describe_value, (part.start, part.stop, part.step)))
        raise ConfigError(f"{name} must be a slice of whole numbers with a step of at least 1; got slice({ends}).")


def mark_keys(keys: slice | Tensor, size: int, device: torch.device) -> Tensor:
    """Return whether each key is in a set, bool (size,): a slice or a bool (size,). Raises ShapeError for another tensor."""
    seen = torch.zeros(size, dtype=torch.bool, device=device)
    if isinstance(keys, Tensor) and (keys.dtype != torch.bool or keys.shape != seen.shape):
        raise ShapeError(f"keys must be a slice or a bool tensor ({size},), got {keys.dtype} {tuple(keys.shape)}.")
    seen[select_places("keys", keys, size).to(device)] = True
    return seen


def check_back(back: int) -> int:
    """Return a number of keys before a query, or raise ConfigError if positions minus it overflow int64."""
    if abs(check_integer("back", back)) > LARGEST_POSITION:
        raise ConfigError("back counts keys before a query's position and must be between -2**61 and 2**61.")
    return int(back)


def check_key_count(n: int, keys: int) -> None:
    """Raise ConfigError unless n is at least 1 and at most the number of keys."""
    if not 1 <= check_integer("n", n) <= keys:
        raise ConfigError(f"n must be at least 1 and at most the number of keys, {keys}; got {describe_value(n)}.")


def is_single(index: Any) -> bool:
    """Return whether an index of an axis is a number, which leaves no axis."""
    return not isinstance(index, slice) and index is not Ellipsis and torch.as_tensor(index).dim() == 0


def select_places(name: str, index: Any, size: int) -> Tensor:
    """Return the places (n,) of an axis that an int, a slice, ..., a list or a tensor selects.

    Raises ConfigError or OutOfRangeError.
    """
    check_index(name, index, size)
    if isinstance(index, slice) or index is Ellipsis:
        return torch.arange(size)[index]
    found = torch.as_tensor(index).cpu()
    return torch.arange(size)[found if found.dtype == torch.bool else found.long()].reshape(-1)
