"""Find norms of queries and keys that come after their rotation by positions, and make scores depend on absolute positions.

A factor of each token and head, as of an RMSNorm without weights, and weights that are equal in each pair of columns commute
with the rotation. A mean that is taken away does not, nor do other weights.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.examination.call_reading.projection_source import ModuleOutput, ProjectionSource, find_source, read_source
from regard.examination.call_reading.rotary_reading import Rotary, pair_columns
from regard.examination.report import Finding, Unknown

WHAT = "norms of queries and keys come before their rotation by positions"
NEAR = 1e-3  # of factors
FAINT = 1e-2  # of the largest number: smaller ones are left out
CURE = "Normalize the heads first, and rotate them then: q, k = rotate(q_norm(q)), rotate(k_norm(k))."
MEAN = "it takes away a mean, or adds a bias, over columns that the rotation has mixed"
WEIGHTS = "its weights differ in a pair of columns"
DESIGN = "nothing, if it is meant so, as in HunYuan: the norm moved before the rotation else"


class NormCall(NamedTuple):
    """A call of a module that may be a norm: its name, its input and its output, each (b, h, t, d) or (b, t, h, d)."""

    name: str
    given: Tensor
    made: Tensor


class LateNorm(NamedTuple):
    """A norm of queries or keys (`who`) after their rotation, and why it does not commute with it: MEAN, WEIGHTS or ""."""

    who: str
    name: str
    rotary: Rotary
    problem: str

    @property
    def sentence(self) -> str:
        """What is wrong, in words."""
        how = f"{self.who} are normalized by {self.name} after they are rotated"
        return f"{how}, and {self.problem}: scores depend on absolute positions"


def find_late_norm(
    who: str, x: Tensor, source: ProjectionSource | None, calls: Sequence[NormCall], outputs: Sequence[ModuleOutput]
) -> LateNorm | None:
    """Return the norm that made x (b, h, t, d) of rotated heads; None without one."""
    if source is None or not source.is_equal_to(x):
        return None
    for one in (one for one in calls if one.name == source.name):
        for given, made in ((one.given, one.made), (one.given.transpose(1, 2), one.made.transpose(1, 2))):
            if made.shape[::2] != x.shape[::2] or made.shape[-1] != x.shape[-1] or not is_made_of(x, made):
                continue
            rotary = read_source(given, find_source(given, outputs))
            if rotary is None:
                continue
            factors = (made.double() / given.double()).masked_fill(given.abs() < FAINT * given.abs().max(), torch.nan)
            pairs = torch.view_as_real(pair_columns(factors[..., : rotary.width], rotary.style))
            if is_constant(pairs):
                return LateNorm(who, one.name, rotary, "")
            has_weights_only = is_constant((factors / factors[..., :1]).movedim(-1, 0).flatten(1))
            return LateNorm(who, one.name, rotary, WEIGHTS if has_weights_only else MEAN)
    return None


def is_made_of(x: Tensor, made: Tensor) -> bool:
    """Return whether each head of x (b, h, t, d) is a head of a norm's output (b, g, t, d)."""
    near = torch.cdist(x.double().transpose(0, 1).flatten(1), made.double().transpose(0, 1).flatten(1), p=torch.inf)
    return bool((near.amin(1) <= NEAR * x.abs().max()).all())


def is_constant(x: Tensor) -> bool:
    """Return whether numbers are equal along the last axis, of those that are known."""
    top, low = (x.nan_to_num(nan=fill).amax(-1) if fill < 0 else x.nan_to_num(nan=fill).amin(-1) for fill in (-1e30, 1e30))
    spread = (top - low)[top >= low]
    return bool((spread <= NEAR * torch.maximum(top.abs(), low.abs())[top >= low]).all())


def check_order(norms: Sequence[tuple[str, LateNorm]]) -> Finding | Unknown | None:
    """Return the first norm that does not commute with the rotation before it, of those in the modules of these names, or None.

    A mean is a mistake; weights may be meant, as published models have them.
    """
    for name, one in sorted((norm for norm in norms if norm[1].problem), key=lambda norm: norm[1].problem == WEIGHTS):
        sentence = f"in {name or 'the layer'} {one.sentence}"
        if one.problem == WEIGHTS:
            return Unknown(f"whether {WHAT}: {sentence}", DESIGN)
        return Finding("wrong positions", sentence, CURE, 1.45, "positions", name)
    return None
