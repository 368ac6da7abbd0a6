"""Weights as 16-bit codes: 0 where nothing is visible, else c ≥ 1 for the weight 2^((c - 65535) / 2048).

One step of the code is a factor of 1.0003 for small and large weights alike; all visible weights up to 2^-32, including 0,
have code 1.
"""

import torch
from torch import Tensor

LARGEST, OCTAVE = 65535, 2048  # the code of weight 1, and the number of codes for each factor of 2
LEAST = 2.0**-32


def encode_weights(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """Encode weights as uint16; `visible`, bool, marks which zero weights belong to visible entries, none by default.

    A weight above 0 counts as visible. NaN has no code and becomes 0.
    """
    bits = weights.nan_to_num(0).clamp(LEAST, 1).log2_().mul_(OCTAVE).add_(LARGEST).round_().clamp_(min=1)
    seen = weights > 0 if visible is None else (weights > 0) | (visible & (weights == 0))
    return bits.mul_(seen).to(torch.int32).to(torch.uint16)


def decode_weights(codes: Tensor) -> Tensor:
    """Decode codes to weights, float32."""
    numbers = codes.to(torch.int32)
    return torch.exp2((numbers - LARGEST).float() / OCTAVE).masked_fill(numbers == 0, 0)
