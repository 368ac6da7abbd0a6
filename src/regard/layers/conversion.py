"""Helpers of the conversions between layers."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

Layer = TypeVar("Layer", bound=nn.Module)


def make_uninitialized(make: Callable[[], Layer], like: Tensor) -> Layer:
    """Return a layer with uninitialized weights, of the dtype and device of a tensor; no random numbers are drawn."""
    with torch.device("meta"):
        layer = make()
    return layer.to_empty(device=like.device).to(like.dtype)


def copy_rows(sources: Sequence[nn.Linear], targets: Sequence[nn.Linear]) -> None:
    """Copy the concatenated rows of some linear layers into those of others."""
    with torch.no_grad():
        for name in ("weight", "bias") if sources[0].bias is not None else ("weight",):
            rows = torch.cat([getattr(source, name) for source in sources])
            for target, part in zip(targets, rows.chunk(len(targets)), strict=True):
                getattr(target, name).copy_(part)
