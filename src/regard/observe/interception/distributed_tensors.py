"""Attention on DTensors whose heads are split among ranks: the queries, keys, values and masks of this rank's heads."""

from typing import Any

from torch import Tensor

from regard.observe.interception.plain_tensors import UnreadableError

HEADS = -3  # the axis of heads of (..., h, t, d)
SPLIT = "its tensors are split among the ranks along another axis than the heads, so that no rank has whole rows"
UNLIKE = "its queries and its {} are not split among the ranks alike"


def is_distributed(*tensors: Any) -> bool:
    """Return whether one of some tensors is a DTensor, whose class is not imported here."""
    return any(type(x).__name__ == "DTensor" for x in tensors)


def is_split(x: Any) -> bool:
    """Return whether the heads of a tensor are split among ranks. Raises UnreadableError if anything else of it is."""
    placements = x.placements if is_distributed(x) else ()
    axes = {one.dim - x.dim() * (one.dim >= 0) if one.is_shard() else None for one in placements if not one.is_replicate()}
    if axes - {HEADS}:
        raise UnreadableError(SPLIT)
    return bool(axes)


def take_local(x: Any) -> Any:
    """Return this rank's part of a DTensor; anything else as it is."""
    return x.to_local() if is_distributed(x) else x


def take_local_heads(query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return queries, keys, values and a mask of the heads that this rank computes.

    Raises UnreadableError if no head is whole on this rank, or if keys or a mask are not of the same heads.
    """
    splits = is_split(query)
    for name, x in (("keys", key), ("values", value)):
        if is_split(x) != splits and not (splits and x.shape[HEADS] == 1):
            raise UnreadableError(UNLIKE.format(name))
    has_heads = isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[HEADS] > 1
    if has_heads and is_split(mask) != splits:
        raise UnreadableError(UNLIKE.format("mask"))
    return take_local(query), take_local(key), take_local(value), take_local(mask)
