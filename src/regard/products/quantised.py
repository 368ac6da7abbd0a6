"""A matrix in bytes: each row is whole numbers from -127 to 127 times a scale of its own."""

from typing import Self

import torch
from torch import Tensor, nn

from regard.products.dense import compiled, free, linear, multiply

MOST = 8  # vectors that the compiled product is for
ROWS = 1024  # that are turned back into numbers at a time, for more of them


class Quantised(nn.Module):
    """x Wᵀ + b, W in bytes: W[r] is scale[r] times whole numbers, the largest of them 127.

    Each number is off by at most scale[r] / 2. x stays what it is, float32 or float64.
    """

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.values: Tensor
        self.scales: Tensor
        self.bias: Tensor | None
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """The nearest to weight (rows, n); a row of zeros stays one."""
        weight = weight.detach().float()
        scales = weight.abs().amax(-1) / 127
        values = (weight / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)).round_().to(torch.int8)
        return cls(values, scales, None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """x (..., n) to (..., rows)."""
        few = x.numel() <= MOST * self.values.shape[1] and x.shape[-1] == self.values.shape[1]
        if few and free(x) and compiled() is not None:
            output = torch.empty(*x.shape[:-1], len(self.values))
            multiply("BYTES", self.values, self.scales, x, self.bias, output)
            return output
        found = x.new_empty(*x.shape[:-1], len(self.values))
        for start in range(0, len(self.values), ROWS):
            part = slice(start, start + ROWS)
            found[..., part] = linear(x, self.values[part].to(x.dtype)).mul_(self.scales[part].to(x.dtype))
        return found if self.bias is None else found.add_(self.bias.to(x.dtype))

    def rows(self, index: Tensor) -> Tensor:
        """W[index], in float32."""
        return self.values[index] * self.scales[index].unsqueeze(-1)
