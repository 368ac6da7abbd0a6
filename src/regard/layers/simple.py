"""Self-attention without trainable weights: every token attends to every other by their dot product."""

from typing import Any

from torch import Tensor, nn

from regard.layers import checks
from regard.mechanism import Steps, attend, attention


class SimpleSelfAttention(nn.Module):
    """softmax(x xᵀ) x. Shapes: x (t, d) or (b, t, d); the context has the shape of x."""

    scale = 1.0  # the lectures begin without the division by √d

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context of each token."""
        checks.check_input(x)
        return compute_head_context(x, x, x, scale=self.scale)

    def steps(self, x: Tensor) -> Steps:
        """Compute every step of forward."""
        checks.check_input(x)
        return compute_head_steps(x, x, x, scale=self.scale)


def compute_head_context(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Compute the context of one head without an axis for heads, (t, d) or (b, t, d); options are those of attention."""
    return attention(q.unsqueeze(-3), k.unsqueeze(-3), v.unsqueeze(-3), **options).squeeze(-3)


def compute_head_steps(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Steps:
    """Compute every step of one head without an axis for heads, (t, d) or (b, t, d); options are those of attend."""
    return remove_head_axis(attend(q.unsqueeze(-3), k.unsqueeze(-3), v.unsqueeze(-3), **options))


def remove_head_axis(steps: Steps) -> Steps:
    """Remove the axis of heads from the steps of one head."""
    return Steps(*(step.squeeze(-3) for _, step in steps.items()))
