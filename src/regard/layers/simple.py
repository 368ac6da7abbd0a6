"""Self-attention with nothing to train: every token attends to every other by the dot product of the two."""

from torch import Tensor, nn

from regard.layers import checks
from regard.layers.one_head import context_of, steps_of
from regard.mechanism import Steps


class SimpleSelfAttention(nn.Module):
    """softmax(x xᵀ) x. Shapes: x (t, d) or (b, t, d); the context has the shape of x."""

    scale = 1.0  # the scores are not divided by √d yet: this is where the lectures begin

    def forward(self, x: Tensor) -> Tensor:
        """The context of each token."""
        checks.fits(x)
        return context_of(x, x, x, scale=self.scale)

    def steps(self, x: Tensor) -> Steps:
        """Every step of forward."""
        checks.fits(x)
        return steps_of(x, x, x, scale=self.scale)
