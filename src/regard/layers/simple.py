"""Self-attention without trainable weights: every token attends to every other by their dot product."""

from torch import Tensor, nn

from regard.layers import checks
from regard.layers.single_head import compute_head_context, compute_head_steps
from regard.mechanism import Steps


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
