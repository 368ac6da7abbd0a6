"""Read rotary positions from projections and the queries or keys made of them: pairs of columns, angles, and mistakes."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

NEAR = 2e-3  # of the norms of pairs, and of phasors
STYLES = ("halves", "interleaved")


class Rotary(NamedTuple):
    """A rotation by position: which columns form pairs, how many columns rotate, and the phasor of each token and pair."""

    style: str
    width: int
    phasors: Tensor  # complex (t, pairs)

    @property
    def steps(self) -> Tensor:
        """The phasor by which each pair turns from one token to the next, (pairs,)."""
        steps = self.phasors[1:] / self.phasors[:-1]
        return steps.mean(0) / steps.mean(0).abs().clamp_min(1e-9)


def read_rotary(projected: Tensor, rotated: Tensor) -> Rotary | None:
    """Return how a projection (b, h, t, d) was rotated; None if it was not, or not by pairs with one angle for each token."""
    if torch.allclose(projected, rotated, rtol=0, atol=1e-6 * float(projected.abs().max())):
        return None
    d = projected.shape[-1]
    for width in range(d - d % 2, 1, -2):
        if not is_near(projected[..., width:], rotated[..., width:], projected):
            return None  # fewer columns rotate than this, but those beyond changed
        for style in STYLES:
            phasors = find_phasors(*(pair_columns(x[..., :width], style) for x in (projected, rotated)))
            if phasors is not None:
                return Rotary(style, width, phasors)
    return None


def is_near(one: Tensor, other: Tensor, like: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding of `like`."""
    return not one.numel() or bool((one - other).abs().max() < NEAR * like.abs().max())


def pair_columns(x: Tensor, style: str) -> Tensor:
    """Return the pairs of columns (..., 2 n) as complex numbers (..., n)."""
    one, other = x.chunk(2, -1) if style == "halves" else (x[..., ::2], x[..., 1::2])
    return torch.complex(one.contiguous(), other.contiguous())


def find_phasors(before: Tensor, after: Tensor) -> Tensor | None:
    """Return the phasor (t, n) that turns each pair (b, h, t, n), the same in all heads; None if pairs are not turned so."""
    phasors = (after * before.conj()).sum((0, 1)) / before.abs().square().sum((0, 1)).clamp_min(1e-30)
    if not bool(((phasors.abs() - 1).abs() < NEAR).all()):
        return None
    return phasors if is_near(torch.view_as_real(before * phasors), torch.view_as_real(after), before.abs()) else None


def find_mistakes(q: Rotary, k: Rotary) -> Iterator[str]:
    """Yield what is wrong with the rotations of queries and keys, in words."""
    if q.style != k.style:
        yield f"queries are rotated in pairs of {describe_style(q.style)}, but keys in pairs of {describe_style(k.style)}"
        return
    if q.width != k.width:
        yield f"{q.width} columns of queries are rotated, but {k.width} of keys"
        return
    if q.phasors.shape != k.phasors.shape:  # a cache, or another sequence
        return
    difference = (q.phasors - k.phasors).abs() > 10 * NEAR
    turned = (q.steps - k.steps).abs() > 10 * NEAR
    if bool(difference.any()) and bool(((q.phasors - k.phasors.conj()).abs() < 10 * NEAR).all()):
        yield "queries and keys are rotated in opposite directions: their scores depend on the sum of positions"
    elif bool(turned.any()):
        yield "queries and keys are rotated by different angles"
    elif bool(difference.any()):
        yield "queries and keys start at different positions"
    elif bool(((q.phasors[0] - 1j).abs() < 10 * NEAR).all()):
        yield "cos and sin are exchanged: the first token is turned by 90°, and the others the other way round"


def describe_style(style: str) -> str:
    """Return the columns that form a pair, in words."""
    return "columns i and i + d / 2" if style == "halves" else "neighboring columns"


def fit_without_minus(projected: Tensor, rotated: Tensor) -> bool:
    """Return whether each pair (a, b) became (a cos + b sin, b cos + a sin): rotate_half without its minus."""
    if projected.shape[-1] % 2:
        return False
    for style in STYLES:
        before, after = (pair_columns(x, style) for x in (projected, rotated))
        total, difference = before.real + before.imag, before.real - before.imag
        sums = ((after.real + after.imag) * total).sum((0, 1)) / total.square().sum((0, 1)).clamp_min(1e-30)
        gaps = ((after.real - after.imag) * difference).sum((0, 1)) / difference.square().sum((0, 1)).clamp_min(1e-30)
        made = torch.stack((total * sums, difference * gaps))
        given = torch.stack((after.real + after.imag, after.real - after.imag))
        if is_near(made, given, projected) and bool((sums - gaps).abs().max() > 10 * NEAR):
            return True
    return False
