"""Read a scale that grows with the logarithm of the number of tokens, and one of each query with that of its position.

Chiang and Cholak 2022, Overcoming a Theoretical Limitation of Self-Attention; Su 2021, https://kexue.fm/archives/8823; Qwen.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.examination.call_reading.inner_calls import InnerCall
from regard.examination.report import Checked

NEAR = 1e-3  # of a scale
LEAST_BASE = 1.9  # of logarithms: a larger factor has no 1 / √d


def read_log_factor(few: Sequence[InnerCall], many: Sequence[InnerCall]) -> float | None:
    """Return the number c if the scale of each call is c log t for t tokens, few or many; None if it is not.

    c is at most that of 1 / √d times a logarithm in base 2.
    """
    factors: set[float] = set()
    for one, other in zip(few, many, strict=False):
        t, longer = one.call.q.shape[2], other.call.q.shape[2]
        if not one.scale or not other.scale or min(t, longer) < 2 or t == longer:
            return None
        factor = one.scale / math.log(t)
        most = one.width**-0.5 / math.log(LEAST_BASE)
        if factor > most or abs(other.scale / (factor * math.log(longer)) - 1) > NEAR:
            return None
        factors.add(round(factor, 6))
    return factors.pop() if len(few) == len(many) and len(factors) == 1 else None


def report_log_scale(factor: float, few: Sequence[InnerCall], many: Sequence[InnerCall]) -> Checked:
    """Return that the scale is by a published definition, with the number of tokens of both calls."""
    base = math.exp(few[0].width ** -0.5 / factor)
    own = f"log t / √{few[0].width}" if abs(base / math.e - 1) < NEAR else f"log t / (log {base:.4g} √{few[0].width})"
    what = f"the scale grows with the logarithm of the number of tokens t, {factor:.4g} log t = {own}, as in log-length scaled "
    lengths = f"{few[0].call.q.shape[2]} and {many[0].call.q.shape[2]} tokens"
    return Checked(f"{what}attention", f"with {lengths}; a factor that differs by {NEAR:.1%} would be detected")


def find_log_base(factors: Tensor) -> float | None:
    """Return the number n if factors of queries (q,) are 1 up to position n, counted from 1, and log position / log n after."""
    positions = torch.arange(1, len(factors) + 1, dtype=torch.float64)
    beyond = factors != 1
    if int(beyond.sum()) < 2:
        return None
    ratios = factors[beyond] / positions[beyond].log()
    base = math.exp(1 / float(ratios.mean()))
    is_steady = bool(((ratios / ratios.mean() - 1).abs() < NEAR).all())
    return base if is_steady and bool((beyond == (positions > base * (1 + NEAR))).all()) else None
