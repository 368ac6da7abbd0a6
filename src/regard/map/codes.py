"""Weights as codes of 16 bits: 0 where nothing is visible, else c ≥ 1 for the weight 2^((c - 65535) / 2048).

A step of a code is a factor of 1.0003, alike for the smallest weights and the largest; from 2^-32 down, 0 among them, all
visible weights are 1.
"""

import torch
from torch import Tensor

LARGEST, OCTAVE = 65535, 2048  # the code of weight 1, and the codes between a weight and its double
LEAST = 2.0**-32


def coded(weights: Tensor, visible: Tensor | None = None) -> Tensor:
    """The codes of weights, uint16; visible, bool, says which of the zeros are of something that may be seen, none by default.

    A weight that is not zero is visible. NaN has no code, and becomes 0.
    """
    bits = weights.nan_to_num(0).clamp(LEAST, 1).log2_().mul_(OCTAVE).add_(LARGEST).round_().clamp_(min=1)
    seen = weights > 0 if visible is None else (weights > 0) | (visible & (weights == 0))
    return bits.mul_(seen).to(torch.int32).to(torch.uint16)


def decoded(codes: Tensor) -> Tensor:
    """The weights of codes, float32."""
    numbers = codes.to(torch.int32)
    return torch.exp2((numbers - LARGEST).float() / OCTAVE).masked_fill(numbers == 0, 0)
