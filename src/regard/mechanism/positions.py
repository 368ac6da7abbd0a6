"""Position encodings: sinusoidal positions, added to the tokens, and rotary positions, applied to q and k."""

import math
from typing import Literal

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError, TooLargeError
from regard.mechanism.arguments import check_choice, check_count, check_number, check_tensor_axes, describe_value

BASE = 10_000.0  # the longest wave is 2π times this
LARGEST = 2**30  # entries of a table


def sinusoidal(t: int, width: int, *, base: float = BASE) -> Tensor:
    """Compute sin(p / base^(2i/c)) in column 2i and cos(p / base^(2i/c)) in column 2i + 1: (t, c) in float32.

    Source: Vaswani et al. 2017, section 3.5.
    """
    t, width = check_count("t", t, 0), check_count("width", width, 2)
    if t * width > LARGEST:
        raise TooLargeError(f"the positions of {t:,} tokens would take {8 * t * width:,} bytes; the limit is {8 * LARGEST:,}.")
    if width % 2:
        raise ConfigError(f"width must be even, a sine and a cosine for each frequency; got {width}.")
    angles = torch.arange(t, dtype=torch.float64).unsqueeze(-1) * rotation_frequencies(width, base)  # (t, c/2)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).float()


def rotary(
    x: Tensor, positions: Tensor | None = None, *, base: float = BASE, pairing: Literal["halves", "adjacent"] = "halves"
) -> Tensor:
    """Rotate each pair (a, b) of columns by the angle p / base^(2i/d), so that q·k depends on distance alone.

    Shapes: x (..., t, d), d even; positions (t,), or any that broadcasts with x's axes before d; 0 ... t - 1 by default.
    `pairing`: column i with i + d/2 (GPT-NeoX, Llama in transformers), or 2i with 2i + 1 (the paper, GPT-J).
    Source: Su et al. 2021, equation 34.
    """
    if check_tensor_axes("x", x, 2).shape[-1] % 2:
        raise ShapeError(f"x must be (..., t, d) with an even d, got {tuple(x.shape)}.")
    check_choice("pairing", pairing, ("halves", "adjacent"))
    positions = torch.arange(x.shape[-2], device=x.device) if positions is None else check_positions(positions, x)
    # float32 is 1e-2 off at 100,000
    angles = positions.double().unsqueeze(-1) * rotation_frequencies(x.shape[-1], base).to(x.device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1) if pairing == "halves" else (x[..., ::2], x[..., 1::2])
    pairs = a * cos - b * sin, a * sin + b * cos
    return torch.cat(pairs, -1) if pairing == "halves" else torch.stack(pairs, -1).flatten(-2)


def check_positions(positions: Tensor, x: Tensor) -> Tensor:
    """Return the positions of the tokens of x (..., t, d), or raise ConfigError or ShapeError."""
    if not isinstance(positions, Tensor) or positions.is_complex() or positions.is_nested or positions.is_quantized:
        raise ConfigError(f"positions must be a tensor of numbers, got {describe_value(positions)}.")
    fits = all(came in (1, there) for came, there in zip(positions.shape[::-1], x.shape[-2::-1], strict=False))
    if not fits or positions.dim() >= x.dim() or positions.layout is not torch.strided:
        raise ShapeError(
            f"positions must broadcast to {tuple(x.shape[:-1])}, x's axes before d; got {describe_value(positions)}."
        )
    return positions.to(x.device)


def rotation_frequencies(width: int, base: float) -> Tensor:
    """Compute base^(-2i/c) for i below c/2, in radians per token, float64."""
    base = check_number("base", base)
    if not 0 < base < math.inf:
        raise ConfigError(f"base must be above 0 and finite, got {base}.")
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
