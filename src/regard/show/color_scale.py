"""Scales that map values to colors or positions along an axis: linear, logarithmic, and both with a sign."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import ConfigError

MAX_LINEAR_TOKENS = 48  # maximum tokens for a linear scale of colors; with more, most weights are small
SMALL_WEIGHT = 0.1  # fraction of the largest weight, below which a linear scale shows nothing
MIN_LOG_WEIGHT = 1e-4  # smallest weight at which a logarithmic scale of colors may start
PALEST_SHARE = 0.02  # share of the weights below the start of a logarithmic scale
SMALL_ENTRY = 0.01  # part of the largest entry of a signed map in size; if most are smaller, its scale is logarithmic
SIGNED_DECADES = 4  # of a logarithmic scale on each side of 0
SMALL_WEIGHTS_LIMIT = 1 / 3  # share of all attention on such small weights, above which the scale is logarithmic


@dataclass(frozen=True)
class LinearScale:
    """A linear scale from low to high; None is the smallest or the largest value."""

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        check_ends(self.low, self.high)

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """Return low and high for these values, of which only the finite count: 0 and 1 where there are none."""
        finite = [value for value in values if math.isfinite(value)]
        low = min(finite, default=0.0) if self.low is None else self.low
        high = max(finite, default=1.0) if self.high is None else self.high
        return low, high if high > low else low + (abs(low) or 1)

    def share(self, value: float, ends: tuple[float, float]) -> float:
        """Return the position of a value between low, 0, and high, 1; a value outside counts as the end."""
        low, high = ends
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def get_value(self, share: float, ends: tuple[float, float]) -> float:
        """Return the value at a share of the scale."""
        low, high = ends
        return low + share * (high - low)


@dataclass(frozen=True)
class Log:
    """A logarithmic scale from low to high; None is the smallest positive or the largest value. Less than low counts as low."""

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        check_ends(self.low, self.high)
        if min(end for end in (self.low, self.high, math.inf) if end is not None) <= 0:
            raise ConfigError(f"the ends of a Log scale must be above 0, got low={self.low}, high={self.high}.")

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """Return low and high for these values, of which only the finite above 0 count: 0.1 and 1 where there are none."""
        above = [value for value in values if math.isfinite(value) and value > 0]
        low = min(above, default=0.1) if self.low is None else self.low
        high = max(above, default=1.0) if self.high is None else self.high
        return low, high if high > low else 10 * low

    def share(self, value: float, ends: tuple[float, float]) -> float:
        """Return the logarithmic position of a value between low, 0, and high, 1; a value outside counts as the end."""
        low, high = ends
        return math.log(min(max(value, low), high) / low) / math.log(high / low)

    def get_value(self, share: float, ends: tuple[float, float]) -> float:
        """Return the value at a share of the scale."""
        low, high = ends
        return float(low * (high / low) ** share)


@dataclass(frozen=True)
class Signed:
    """A linear scale from -high to high in two hues, with 0 in the middle; None is the largest value in size."""

    high: float | None = None

    def __post_init__(self) -> None:
        if self.high is not None and not self.high > 0:
            raise ConfigError(f"the end of a Signed scale must be above 0, got high={self.high:g}.")

    def ends(self, values: Sequence[float]) -> tuple[float, float]:
        """Return -high and high for these values, of which only the finite count."""
        high = compute_signed_limit(values) if self.high is None else self.high
        return -high, high

    def share(self, value: float, ends: tuple[float, float]) -> float:
        """Return the position of a value between -high, 0, and high, 1; a value outside counts as the end."""
        return LinearScale(*ends).share(value, ends)

    def get_value(self, share: float, ends: tuple[float, float]) -> float:
        """Return the value at a share of the scale."""
        return LinearScale(*ends).get_value(share, ends)


@dataclass(frozen=True)
class SignedLog(Signed):
    """A logarithmic scale from -high to high in two hues: four decades on each side of 0, and less in size counts as 0."""

    def share(self, value: float, ends: tuple[float, float]) -> float:
        """Return the position of a value between -high, 0, and high, 1; a value outside counts as the end."""
        return float(share_signed_log(np.float64(value), ends[1]))

    def get_value(self, share: float, ends: tuple[float, float]) -> float:
        """Return the value at a share of the scale."""
        return float(invert_signed_log(np.float64(share), ends[1]))


Scale = LinearScale | Log
ColorScale = Scale | Signed


def share_signed_log(values: Any, high: float) -> Any:
    """Return the positions of an array of values between -high, 0, and high, 1: their powers of ten on each side of 0."""
    sizes = np.clip(np.abs(values) / high, 10.0**-SIGNED_DECADES, 1)
    return (1 + np.sign(values) * (1 + np.log10(sizes) / SIGNED_DECADES)) / 2


def invert_signed_log(shares: Any, high: float) -> Any:
    """Return the values at positions of a signed logarithmic scale."""
    distances = 2 * shares - 1
    return np.sign(distances) * high * 10 ** (SIGNED_DECADES * (np.abs(distances) - 1))


def choose_scale(weights: Tensor, tokens: int) -> Scale:
    """Choose a scale for weights: logarithmic for many tokens or much attention on small weights, else linear from 0."""
    seen = weights[weights > 0].double()
    if tokens <= MAX_LINEAR_TOKENS and (
        not len(seen) or seen[seen < SMALL_WEIGHT * seen.max()].sum() <= SMALL_WEIGHTS_LIMIT * seen.sum()
    ):
        return LinearScale(low=0)
    return make_log_scale(seen)


def choose_signed_scale(entries: Tensor, tokens: int) -> Signed:
    """Choose a scale for the entries of a signed map: logarithmic for many tokens where most entries are small, else linear."""
    sizes = entries[entries.isfinite() & (entries != 0)].double().abs()
    is_even = not len(sizes) or float(sizes.median()) >= SMALL_ENTRY * float(sizes.max())
    return Signed() if tokens <= MAX_LINEAR_TOKENS or is_even else SignedLog()


def make_log_scale(seen: Tensor) -> Log:
    """Return a logarithmic scale from the 2 % quantile of these positive weights, at least 1e-4, to the largest."""
    if not len(seen):
        return Log()
    low = max(float(seen.float().quantile(PALEST_SHARE)), MIN_LOG_WEIGHT)
    return Log(low, max(float(seen.max()), 2 * low))


def compute_signed_limit(values: Sequence[float]) -> float:
    """Return the end of a scale from -limit to limit: the largest of the finite values in size; 1 if none differs from 0."""
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 1.0


def check_ends(low: float | None, high: float | None) -> None:
    """Raise ConfigError where low is not below high."""
    if low is not None and high is not None and not low < high:
        raise ConfigError(f"low must be below high in a scale, got low={low:g}, high={high:g}.")
