"""Views of a tensor as views of its positions: each dimension of the view steps along dimensions of the tensor."""

from typing import NamedTuple

from torch import Tensor

Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides and offset


class Dimension(NamedTuple):
    """A dimension of a tensor: its stride, its size and its number."""

    stride: int
    size: int
    number: int


Steps = list[tuple[int, dict[int, int]]]  # counts, outermost first, each with the entries that one step moves by dimension


def view_by_strides(positions: Tensor, layout: Layout, other: Layout) -> Tensor | None:
    """Return the positions of a view of a tensor, by the layouts of both, of size 1 along dimensions that have the same.

    None if a dimension of the view passes the end of one of the tensor at an uneven place, or if entries are elsewhere.
    """
    (shape, strides, offset), (sizes, steps, start) = layout, other
    dims = sorted((Dimension(strides[n], size, n) for n, size in enumerate(shape) if size > 1), reverse=True)
    rest = start - offset
    if rest < 0 or 0 in sizes or not are_nested(dims):
        return None
    places = {}
    for stride, _, n in dims:
        places[n], rest = divmod(rest, stride)
    if rest:
        return None
    varying = {n for n in places if positions.shape[n] > 1}
    first = positions.storage_offset() + sum(places[n] * positions.stride(n) for n in varying)
    counts, moves, viewed = [], [], []
    for size, step in zip(sizes, steps, strict=True):
        found = split_steps(dims, size, step, places)
        if found is None:
            return None
        varies = any(varying & moved.keys() for _, moved in found)
        viewed.append(size if varies else 1)
        for count, moved in found if varies else []:
            counts.append(count)
            moves.append(sum(positions.stride(n) * by for n, by in moved.items() if n in varying))
    if any(places[n] >= size for _, size, n in dims):
        return None
    return positions.as_strided(counts, moves, first).reshape(viewed).contiguous()


def are_nested(dims: list[Dimension]) -> bool:
    """Return whether an offset is that of one entry at most: each stride is larger than all dimensions after it reach."""
    reach = 0
    for stride, size, _ in reversed(dims):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def split_steps(dims: list[Dimension], size: int, step: int, places: dict[int, int]) -> Steps | None:
    """Return the steps of a dimension of a view; `places` becomes the last entry that it reaches of each dimension.

    A dimension that is as long as several of the tensor together is split into these. None if it is none of them.
    """
    if size == 1 or not step:
        return [(size, {})]
    moved, rest = {}, step
    for stride, _, n in dims:
        by, rest = divmod(rest, stride)
        if by:
            moved[n] = by
    lengths = {n: length for _, length, n in dims}
    if rest:
        return None
    inner = size
    if any(places[n] + by * (size - 1) >= lengths[n] for n, by in moved.items()):
        (n, by), *others = moved.items()
        inner = lengths[n] // by
        if others or lengths[n] % by or inner < 2 or size % inner:
            return None
    for n, by in moved.items():
        places[n] += by * (inner - 1)
    outer = [] if inner == size else split_steps(dims, size // inner, step * inner, places)
    return None if outer is None else [*outer, (inner, moved)]
