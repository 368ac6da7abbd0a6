"""Read the frequencies of rotary positions, the angle of each pair of columns from one token to the next.

They fall with the pair i of n as base ** (-i / n): Su et al. 2021, RoFormer, section 3.2.2.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.call_reading.projection_source import read_source
from regard.examination.call_reading.rotary_reading import Rotary
from regard.examination.report import Unknown

STEADY = 2e-3  # between the phasors of steps
SAME = 1e-4  # between phasors of pairs that have one frequency
LEAST_ANGLE = 0.1  # of pairs that have one frequency: smaller ones are not told apart
LEAST_PAIRS = 3  # that show how frequencies grow
MOST_PAIRS = 8  # of which they are compared: later powers of a number that was read are not exact
MOST_FACTOR = 1e3  # from pair to pair
ROUND = 1e-4  # relative difference of a base from a number of one digit
OFF = 0.02  # of a stated base
TWICE = "nothing, if the layer is trained so from the start: weights that were trained with RoPE need 1 radian"


def read_frequencies(rotary: Rotary) -> Tensor | None:
    """Return the angle of each pair from one token to the next, (pairs,), in (-π, π]; None if tokens differ, or heads do.

    Angles the other way round are returned as if they were not.
    """
    phasors = rotary.phasors
    if rotary.is_by_head or len(phasors) < 3:
        return None
    steps = phasors[1:] / phasors[:-1]
    if float((steps - rotary.steps).abs().max()) > STEADY:
        return None  # positions of a grid, or of several documents
    angles = rotary.steps.angle()
    return -angles if float(angles[0]) < 0 else angles


def find_wrong_frequencies(rotary: Rotary) -> str:
    """Describe frequencies that are the same for all pairs, or that grow from 1 by a constant factor; "" if they do not."""
    angles = read_frequencies(rotary)
    if angles is None or len(angles) < 2:
        return ""
    first = float(angles[0])
    if abs(first) > LEAST_ANGLE and float((rotary.phasors - rotary.phasors[:, :1]).abs().max()) < SAME:
        pairs = "both" if len(angles) == 2 else f"all {len(angles)}"
        return f"{pairs} pairs of columns are rotated by the same angles, {first:.3g} radians for each token"
    factor = find_rising_factor(angles)
    if factor is None:
        return ""
    largest = factor ** (len(angles) - 1)
    return f"the frequencies of pairs of columns grow from 1 to {largest:.3g} by factors of {factor:.3g}, and should fall"


def find_rising_factor(angles: Tensor) -> float | None:
    """Return the factor b > 1 with which angles (n,) are b ** i up to whole turns, if b ** n is a round number; else None."""
    n = len(angles)
    if n < LEAST_PAIRS or abs(float(angles[0]) - 1) > STEADY:
        return None
    turns = torch.arange(math.ceil(MOST_FACTOR / (2 * math.pi)))
    factors = float(angles[1]) + 2 * math.pi * turns.double()
    powers = factors[:, None] ** torch.arange(min(n, MOST_PAIRS))  # (factors, pairs)
    apart = 2 * ((powers - angles[: powers.shape[1]].double()) / 2).sin().abs()  # of phasors
    fits = (apart < STEADY + 1e-6 * powers).all(-1) & (factors > 1 + OFF)
    return next((b for b in factors[fits].tolist() if is_round(b**n)), None)


def is_round(number: float) -> bool:
    """Return whether a number has one digit other than 0, up to rounding."""
    near = float(f"{number:.0e}")
    return abs(number / near - 1) < ROUND


def read_base(rotary: Rotary) -> float | None:
    """Return the base of frequencies that fall by a constant factor; None for others."""
    angles = read_frequencies(rotary)
    if angles is None or len(angles) < 2 or not 0 < float(angles[1]) < float(angles[0]):
        return None
    factor = float(angles[1] / angles[0])
    powers = angles[0] * factor ** torch.arange(len(angles))
    return factor ** -len(angles) if bool(((angles - powers).abs() < STEADY).all()) else None


def format_base(base: float) -> str:
    """Format a base."""
    return f"{base:,.0f}" if base >= 99.5 else f"{base:.3g}"


def check_frequencies(calls: Sequence[InnerCall]) -> Unknown | None:
    """Return what frequencies twice those of RoPE may be meant for; else None."""
    for one in calls:
        rotary = read_source(one.call.q, one.q_source)
        if rotary is not None and read_base(rotary) is not None and abs(float(rotary.steps[0].angle().abs()) - 2) < STEADY:
            sentence = "whether it is intended that the first pair of columns is rotated by 2 radians for each token"
            where = f"in {one.name or 'the layer'} all frequencies are twice those of RoPE, as where it is applied twice"
            return Unknown(f"{sentence}: {where}", TWICE)
    return None
