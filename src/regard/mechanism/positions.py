"""Where a token stands: sinusoidal positions added to a token, rotary positions turned into q and k."""

from typing import Literal

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError

BASE = 10_000.0  # the longest wave is 2π times this


def sinusoidal(t: int, width: int, *, base: float = BASE) -> Tensor:
    """sin(p / base^(2i/c)) in column 2i, cos of the same in column 2i + 1: (t, c) in float32.

    Source: Vaswani et al. 2017, section 3.5.
    """
    if width < 2 or width % 2:
        raise ConfigError(f"width must be even, a sine and a cosine for each frequency; got {width}.")
    angles = torch.arange(t, dtype=torch.float64).unsqueeze(-1) * frequencies(width, base)  # (t, c/2)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2).float()


def rotary(
    x: Tensor, positions: Tensor | None = None, *, base: float = BASE, pairing: Literal["halves", "adjacent"] = "halves"
) -> Tensor:
    """Each pair (a, b) of columns turned by the angle p / base^(2i/d), so that q·k depends on distance alone.

    Shapes: x (..., t, d), d even; positions (t,), or any that broadcasts with x's axes before d; 0 ... t - 1 by default.
    `pairing`: column i with i + d/2 (GPT-NeoX, Llama in transformers), or 2i with 2i + 1 (the paper, GPT-J).
    Source: Su et al. 2021, equation 34.
    """
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ShapeError(f"x must be (..., t, d) with an even d, got {tuple(x.shape)}.")
    if not x.is_floating_point():
        raise ConfigError(f"x must be floating, got {x.dtype}.")
    if pairing not in ("halves", "adjacent"):
        raise ConfigError(f'pairing must be "halves" or "adjacent", got {pairing!r}.')
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    angles = positions.double().unsqueeze(-1) * frequencies(x.shape[-1], base).to(x.device)  # float32 is 1e-2 off at 100,000
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1) if pairing == "halves" else (x[..., ::2], x[..., 1::2])
    turned = a * cos - b * sin, a * sin + b * cos
    return torch.cat(turned, -1) if pairing == "halves" else torch.stack(turned, -1).flatten(-2)


def frequencies(width: int, base: float) -> Tensor:
    """base^(-2i/c) for i below c/2, radians a token, float64."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
