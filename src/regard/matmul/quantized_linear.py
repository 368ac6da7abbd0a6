"""Linear layers with int8 weights: each row is integers from -127 to 127 times a scale of its own."""

from typing import Self

import torch
from torch import Tensor, nn

from regard.compiled import threads
from regard.matmul.float32_linear import (
    LEAST,
    can_bypass_torch,
    choose_block_rows,
    launch_product,
    linear,
    load_compiled_products,
)

LARGEST = 32767  # largest integer of a quantized vector
ROWS = 1024  # rows dequantized at a time if the compiled product is not available


class QuantizedLinear(nn.Module):
    """x Wᵀ + b with int8 weights: W[r] is scale[r] times integers, the largest of them 127.

    Each number is off by at most scale[r] / 2. x is used as it is, except for more than one float32 vector and a large W:
    then the vectors are rounded to integers of up to 16 bits, as large as their sums can hold, times a scale each.
    """

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.values: Tensor
        self.scales: Tensor
        self.bias: Tensor | None
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)
        self.most: Tensor  # largest integer of a vector whose products with any row sum to less than 2³¹
        sizes = values.abs().sum(-1, dtype=torch.int64)
        self.register_buffer("most", ((2**31 - 1) // sizes.amax().clamp_min(1)).clamp_max(LARGEST))

    @classmethod
    def from_weight(cls, weight: Tensor, bias: Tensor | None = None) -> Self:
        """Quantize weight (rows, n) to the nearest int8 values; a row of zeros stays zero."""
        weight = weight.detach().float()
        scales = weight.abs().amax(-1) / 127
        values = (weight / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)).round_().to(torch.int8)
        return cls(values, scales, None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., n) to (..., rows)."""
        numbers = [one for one in (x, self.scales, self.bias) if one is not None]
        if (
            x.numel()
            and x.shape[-1] == self.values.shape[1]
            and can_bypass_torch(*numbers)
            and load_compiled_products() is not None
        ):
            output = torch.empty(*x.shape[:-1], len(self.values))
            if x.numel() <= threads.MOST_UNQUANTIZED * x.shape[-1]:
                launch_product("BYTES", self.values, self.scales, x, self.bias, output)
                return output
            if self.values.numel() >= LEAST and threads.find_barrier_address():
                self.multiply_int16(x.contiguous(), output)
                return output
        found = x.new_empty(*x.shape[:-1], len(self.values))
        for start in range(0, len(self.values), ROWS):
            part = slice(start, start + ROWS)
            found[..., part] = linear(x, self.values[part].to(x.dtype)).mul_(self.scales[part].to(x.dtype))
        return found if self.bias is None else found.add_(self.bias.to(x.dtype))

    def multiply_int16(self, x: Tensor, output: Tensor) -> None:
        """Compute x Wᵀ + b into output, with the vectors quantized to int16."""
        (rows, columns), several, products = self.values.shape, torch.get_num_threads(), load_compiled_products()
        count = x.numel() // columns
        padded = count + products.VECTORS  # with the padding of the last group of vectors
        buffers = {"integers": torch.empty(padded, columns, dtype=torch.int16), "factors": torch.empty(padded)}
        sizes = {"rows": rows, "columns": columns, "count": count, "block": choose_block_rows(rows, several)}
        limits = {"largest": int(self.most), "barrier": threads.find_barrier_address()}
        arrays = {"matrix": self.values, "scales": self.scales, "x": x, "bias": self.bias, "output": output}
        threads.run_callback(products.multiply_quantized, several, **sizes, **limits, **arrays, **buffers)

    def dequantize_rows(self, index: Tensor) -> Tensor:
        """Return W[index] in float32."""
        return self.values[index] * self.scales[index].unsqueeze(-1)
