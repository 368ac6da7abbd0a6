"""Read rotary positions from projections and the queries or keys made of them: pairs of columns, angles, and mistakes."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

NEAR = 2e-3  # of the norms of pairs, and of phasors
STYLES = ("halves", "interleaved")
ORDERS = (*zip(STYLES, STYLES, strict=True), STYLES, STYLES[::-1])  # of the pairs before and after
LEAST_PAIRS = 4  # of a token, in all heads and sequences, of which two factors are solved for


class Rotary(NamedTuple):
    """A rotation by position: which columns form pairs, how many columns rotate, and the phasor of each token and pair."""

    style: str
    width: int
    phasors: Tensor  # complex (t, pairs)
    written: str  # which columns the pairs are written to
    is_by_head: bool = False  # each head has angles of its own: phasors (t, h pairs)

    @property
    def columns(self) -> str:
        """The columns that form a pair, and those that it is written to if they are others, in words."""
        moved = "" if self.written == self.style else f", written to {describe_style(self.written)}"
        return f"{describe_style(self.style)}{moved}{', with other angles in each head' if self.is_by_head else ''}"

    def repeat_heads(self, columns: int) -> "Rotary":
        """Return the rotation with each head's phasors repeated to so many, as of grouped keys."""
        times = columns // self.phasors.shape[1]
        heads = self.phasors.unflatten(1, (-1, self.width // 2)).repeat_interleave(max(times, 1), 1).flatten(1)
        return self._replace(phasors=heads)

    @property
    def steps(self) -> Tensor:
        """The phasor by which each pair turns from one token to the next, (pairs,)."""
        steps = self.phasors[1:] / self.phasors[:-1]
        return steps.mean(0) / steps.mean(0).abs().clamp_min(1e-9)


def read_rotary(projected: Tensor, rotated: Tensor) -> Rotary | None:
    """Return how a projection (b, h, t, d) was rotated; None if it was not, or not by pairs with one angle for each token."""
    projected, rotated = drop_zero_tokens(projected, rotated)
    if torch.allclose(projected, rotated, rtol=0, atol=1e-6 * float(projected.abs().max())):
        return None
    d = projected.shape[-1]
    for width in range(d - d % 2, 1, -2):
        if not is_near(projected[..., width:], rotated[..., width:], projected):
            return None  # fewer columns rotate than this, but those beyond changed
        for style, written in ORDERS:
            phasors = find_phasors(pair_columns(projected[..., :width], style), pair_columns(rotated[..., :width], written))
            if phasors is not None and (style == written or bool(((phasors - 1).abs() > NEAR).any())):
                return Rotary(style, width, phasors, written)
    return None


def drop_zero_tokens(projected: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Return a projection and its rotation (b, h, t, d) without the tokens that are zeros in all sequences, if not all are."""
    known = projected.any(-1).flatten(0, 1).any(0)
    return (projected[:, :, known], rotated[:, :, known]) if known.any() and not known.all() else (projected, rotated)


def read_rotary_of_each_head(projected: Tensor, rotated: Tensor) -> Rotary | None:
    """Return how every head of a projection (b, h, t, d) was rotated, by angles of its own; None if one was not, or unlike."""
    read = [read_rotary(one, other) for one, other in zip(projected.split(1, 1), rotated.split(1, 1), strict=True)]
    known = [one for one in read if one is not None]
    if len(known) < len(read) or len({(one.style, one.width, one.written) for one in known}) != 1:
        return None
    return known[0]._replace(phasors=torch.cat([one.phasors for one in known], 1), is_by_head=True)


def is_rotated_before_split(projected: Tensor, rotated: Tensor) -> bool:
    """Return whether the heads of a projection (b, h, t, d) were rotated together, by pairs that lie in different heads."""
    if projected.shape != rotated.shape or projected.shape[1] == 1 or read_rotary_of_each_head(projected, rotated) is not None:
        return False
    return read_rotary(*(x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (projected, rotated))) is not None


OTHER_AXES = {"head": 1, "sequence in the batch": 0}  # of (b, h, t, d)


def find_other_axis(projected: Tensor, rotated: Tensor) -> str:
    """Return whose angles rotated a projection (b, h, t, d), if they are the same for all tokens; "" if they are not."""
    if projected.shape != rotated.shape or projected.shape[2] == 1 or read_rotary(projected, rotated) is not None:
        return ""
    for name, axis in OTHER_AXES.items():
        if projected.shape[axis] > 1 and read_rotary(projected.transpose(axis, 2), rotated.transpose(axis, 2)) is not None:
            return name
    return ""


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
    if q.columns != k.columns:
        yield f"queries are rotated in pairs of {q.columns}, but keys in pairs of {k.columns}"
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
    elif len(q.phasors) > 1 and bool(((q.phasors - q.phasors[:1]).abs() < NEAR).all()):
        yield "all tokens are rotated by the same angles, and so have one position"


def describe_style(style: str) -> str:
    """Return the columns that form a pair, in words."""
    return "columns i and i + d / 2" if style == "halves" else "neighboring columns"


def describe_no_rotation(projected: Tensor, rotated: Tensor) -> str:
    """Describe, of `{}`, how each pair of columns (a, b) becomes linear combinations of a and b that are no rotation.

    They are solved for: of each token and pair, the same in all heads. "" if there are none, or a single token.
    """
    projected, rotated = drop_zero_tokens(projected, rotated)
    b, h, t, d = projected.shape
    is_known = bool(projected.isfinite().all() and rotated.isfinite().all())
    if d % 2 or t < 2 or b * h < LEAST_PAIRS or not is_known:
        return ""
    for style in STYLES:
        before, after = (pair_columns(x, style) for x in (projected, rotated))
        mixing = solve_pair_mixing(before, after)
        made = torch.view_as_complex(torch.einsum("tnij,bhtnj->bhtni", mixing, torch.view_as_real(before)).contiguous())
        if is_near(torch.view_as_real(made), torch.view_as_real(after), before.abs()):
            return describe_mixing(mixing, style)
    return ""


def solve_pair_mixing(before: Tensor, after: Tensor) -> Tensor:
    """Return the matrices (t, n, 2, 2) that come nearest to turning pairs (b, h, t, n) before into those after."""
    x, y = (torch.view_as_real(pairs).flatten(0, 1).permute(1, 2, 0, 3) for pairs in (before, after))  # (t, n, b h, 2)
    mixing: Tensor = (torch.linalg.pinv(x) @ y).mT
    return mixing


def has_regular_factors(factors: Tensor) -> bool:
    """Return whether factors (t, n) are the same for all pairs of a token, or powers of its number, as in xPos."""
    powers = factors[1:2] ** torch.arange(len(factors)).unsqueeze(1)
    return any(bool((factors - other).abs().max() < 10 * NEAR) for other in (factors[:, :1], powers))


def describe_mixing(mixing: Tensor, style: str) -> str:
    """Describe matrices (t, n, 2, 2) that change pairs of columns; "" for rotations times a factor, or a factor of each column.

    The first token must stay as it is, unless a minus is missing.
    """
    (aa, ab), (ba, bb) = (row.unbind(-1) for row in mixing.unbind(-2))

    def is_equal(one: Tensor, other: Tensor) -> bool:
        return bool((one - other).abs().max() < 10 * NEAR)

    zero = torch.zeros(())
    starts_plain = bool((mixing[0] - torch.eye(2)).abs().max() < 10 * NEAR)
    is_turned = is_equal(aa, bb) and is_equal(ab, -ba) and has_regular_factors((aa.square() + ab.square()).sqrt())
    if is_equal(ab, zero) and is_equal(ba, zero):
        cosines = (aa[1:2].clamp(-1, 1).arccos() * torch.arange(len(aa)).unsqueeze(1)).cos()
        has_cosines = is_equal(aa, bb) and is_equal(aa, cosines) and not is_equal(aa, aa[:1])
        return "the sines are missing in the rotation of {}: a pair (a, b) becomes (a cos, b cos)" if has_cosines else ""
    if is_turned:
        return ""
    if is_equal(aa, bb) and is_equal(ab, ba):
        return "a minus is missing in the rotation of {}: a pair (a, b) becomes (a cos + b sin, b cos + a sin)"
    if not starts_plain:
        return ""
    if is_equal(ba, -ab * aa) and is_equal(bb, aa - ab * ab):
        return "in the rotation of {} the first column of each pair is overwritten before the second is computed of it"
    if is_equal(aa.square() + ab.square(), torch.ones(())) and is_equal(ba.square() + bb.square(), torch.ones(())):
        if style == "interleaved":  # V-JEPA 2 is published and trained with tables for halves and pairs of neighbors
            return ""
        return f"the two columns of a pair of {{}}, {describe_style(style)}, are rotated by different angles"
    t, n = divmod(int((mixing - torch.eye(2)).abs().amax((2, 3)).flatten().argmax()), mixing.shape[1])
    one, other = (" ".join((f"{x:.2g} a", f"{y:+.2g} b")) for x, y in mixing[t, n].tolist())
    return (
        f"columns of {{}} are not rotated: of token {t}, pair {n} of {describe_style(style)}, (a, b), becomes ({one}, {other})"
    )
