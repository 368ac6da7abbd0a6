"""Attention of one head on (t, d) or (b, t, d), as the lectures lay it out, which has no axis for heads."""

from typing import Any

from torch import Tensor

from regard.mechanism import Steps, attend, attention


def context_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The context, by the fastest kernel; options are those of attention."""
    return attention(q.unsqueeze(-3), k.unsqueeze(-3), v.unsqueeze(-3), **options).squeeze(-3)


def steps_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Steps:
    """Every step of the same."""
    return without_heads(attend(q.unsqueeze(-3), k.unsqueeze(-3), v.unsqueeze(-3), **options))


def without_heads(steps: Steps) -> Steps:
    """The steps of one head without the axis of heads."""
    return Steps(*(step.squeeze(-3) for _, step in steps.items()))
