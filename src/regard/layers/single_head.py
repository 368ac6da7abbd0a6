"""Attention of one head on (t, d) or (b, t, d), the layout of the lectures, without an axis for heads."""

from typing import Any

from torch import Tensor

from regard.mechanism import Steps, attend, attention


def compute_head_context(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Compute the context by the fastest kernel; options are those of attention."""
    return attention(q.unsqueeze(-3), k.unsqueeze(-3), v.unsqueeze(-3), **options).squeeze(-3)


def compute_head_steps(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Steps:
    """Compute every step of attention; options are those of attend."""
    return remove_head_axis(attend(q.unsqueeze(-3), k.unsqueeze(-3), v.unsqueeze(-3), **options))


def remove_head_axis(steps: Steps) -> Steps:
    """Remove the axis of heads from the steps of one head."""
    return Steps(*(step.squeeze(-3) for _, step in steps.items()))
