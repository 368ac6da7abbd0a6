"""Linear: nn.Linear, whose product with a few vectors is as fast as the memory gives its weights."""

from torch import Tensor, nn

from regard.products import linear


class Linear(nn.Linear):
    """x Wᵀ + b; as nn.Linear, through regard.products."""

    def forward(self, input: Tensor) -> Tensor:
        """x (..., d_in) to (..., d_out)."""
        return linear(input, self.weight, self.bias)
