"""Many heads in one tensor: split, join, and one key head shared among several query heads (MHA, GQA, MQA)."""

from torch import Tensor

from regard.errors import ConfigError, ShapeError


def split(x: Tensor, heads: int) -> Tensor:
    """(b, t, c) to (b, h, t, d), c = h d: head n takes columns n d to (n + 1) d. Unbatched: (t, c) to (h, t, d)."""
    if x.dim() < 2:
        raise ShapeError(f"x must be (b, t, c) or (t, c), got {tuple(x.shape)}.")
    if heads < 1 or x.shape[-1] % heads:
        raise ConfigError(indivisible("width", x.shape[-1], "heads", heads))
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)  # tokens stay apart from heads


def join(x: Tensor) -> Tensor:
    """(b, h, t, d) to (b, t, c): the inverse of split."""
    if x.dim() < 3:
        raise ShapeError(f"x must be (b, h, t, d) or (h, t, d), got {tuple(x.shape)}.")
    return x.transpose(-3, -2).flatten(-2)


def share(k: Tensor, heads: int) -> Tensor:
    """(b, g, k, d) to (b, h, k, d): key head n serves the query heads n h/g to (n + 1) h/g.

    Source: Ainslie et al. 2023 (GQA); g = 1 is Shazeer 2019 (MQA).
    """
    if k.dim() < 3:
        raise ShapeError(f"k must be (b, g, k, d) or (g, k, d), got {tuple(k.shape)}.")
    groups = k.shape[-3]
    if groups == heads:
        return k
    if not groups or heads % groups:
        raise ShapeError(f"k has {groups} heads, which does not divide the {heads} heads of q.")
    return k.repeat_interleave(heads // groups, dim=-3)


def indivisible(width: str, columns: int, heads: str, count: int) -> str:
    """The sentence for a width that the heads cannot share, both by the names that the caller knows."""
    if count < 1:
        return f"{heads} must be at least 1, got {count}."
    nearest = max(round(columns / count), 1) * count
    return f"{width} must be a multiple of {heads}, got {width}={columns}, {heads}={count}. Nearest that works: {nearest}."
