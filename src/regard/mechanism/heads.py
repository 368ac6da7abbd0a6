"""Many heads in one tensor: split, join, and key heads shared among query heads (MHA, GQA, MQA)."""

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism.arguments import check_count, describe_value


def split(x: Tensor, heads: int) -> Tensor:
    """Reshape (b, t, c) to (b, h, t, d), c = h d: head n takes columns n d to (n + 1) d. Unbatched: (t, c) to (h, t, d)."""
    check_head_axes("x", x, 2, "(b, t, c) or (t, c)")
    if x.shape[-1] % check_count("heads", heads):
        raise ConfigError(describe_indivisible_width("width", x.shape[-1], "heads", heads))
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)  # (..., t, h, d) -> (..., h, t, d)


def join(x: Tensor) -> Tensor:
    """Reshape (b, h, t, d) to (b, t, c): the inverse of split."""
    check_head_axes("x", x, 3, "(b, h, t, d) or (h, t, d)")
    return x.transpose(-3, -2).flatten(-2)


def share(k: Tensor, heads: int) -> Tensor:
    """Repeat (b, g, k, d) to (b, h, k, d): key head n serves the query heads n h/g to (n + 1) h/g.

    Source: Ainslie et al. 2023 (GQA); g = 1 is Shazeer 2019 (MQA).
    """
    check_head_axes("k", k, 3, "(b, g, k, d) or (g, k, d)")
    groups = k.shape[-3]
    if groups == check_count("heads", heads, 0):
        return k
    if not groups or heads % groups:
        raise ShapeError(f"k has {groups} heads, which does not divide the {heads} heads of q.")
    return k.repeat_interleave(heads // groups, dim=-3)


def check_head_axes(name: str, x: object, least: int, form: str) -> None:
    """Raise ShapeError unless x is a dense tensor of at least `least` axes; `form` describes them in the message."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested or x.dim() < least:
        raise ShapeError(f"{name} must be a dense tensor {form}, got {describe_value(x)}.")


def describe_indivisible_width(width: str, columns: int, heads: str, count: int) -> str:
    """Return the message for a width that does not divide into heads, with the caller's names for both."""
    if count < 1:
        return f"{heads} must be at least 1, got {count}."
    nearest = max(round(columns / count), 1) * count
    return f"{width} must be a multiple of {heads}, got {width}={columns}, {heads}={count}. Nearest valid width: {nearest}."
