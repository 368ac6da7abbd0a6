"""What turns the queries and keys of a call into weights, as it is intercepted and as it is stored."""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from regard.map.attention_map import AttentionMap
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset


@dataclass(eq=False, kw_only=True)
class ScoreArguments:
    """The mask, the position of the first query, and what changes the scores before the softmax."""

    mask: Mask = EVERYTHING  # on the call's own queries and keys
    offset: Offset = 0
    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    weight: Tensor | None = None  # (d,) of additive scores; None for dot products

    def build_map(self, q: Tensor, k: Tensor, **changes: Any) -> AttentionMap:
        """Return the map of queries and keys with these arguments, except for `changes`."""
        return AttentionMap(q, k, **{one.name: getattr(self, one.name) for one in fields(ScoreArguments)} | changes)
