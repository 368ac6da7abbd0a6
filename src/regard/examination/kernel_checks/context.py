"""Name what a kernel computes instead of the context: another scale, mask, order of heads, or a block too few."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.examination.identify.mistakes import MASKS, NORMS, describe_mixed_heads
from regard.examination.kernel_checks.formula import AttentionFormula, measure_error
from regard.mechanism.heads import share

NEAR = 3e-3  # of the largest number: how closely a variant fits in the precision of any kernel
CLOSER = 0.2  # times the distance from the right context: as near as a mistake has to be that is named
BLOCKS = (128, 64, 32, 16)
LN2 = math.log(2)
SCALE = "Multiply the scores by {:.4g}, and by log2(e) = 1.4427 as well if exp2 is used."
EMPTY = "Give a row that sees nothing the context 0: do not divide where the sum of its weights is 0."
BOUND = "Round the number of blocks up, (keys + block - 1) // block, and hide the keys beyond the last in its scores."
ROLES = "Compute softmax(q kᵀ) v: pass q, k and v in this order."


class WrongContext(NamedTuple):
    """A context that a mistake gives: the kind of finding, what is done, and the cure."""

    kind: str
    does: str
    cure: str
    context: Tensor


def find_wrong_context(found: Tensor, exact: AttentionFormula, other: Tensor | None) -> WrongContext | None:
    """Return the mistake that gives a kernel's context (b, h, q, e), None if none of the known does.

    `other` is who sees whom if queries stand at the other end of the keys, bool (b, h, q, k).
    """
    size = max(float(exact.context.abs().max()), float(found.detach().double().nan_to_num(posinf=0, neginf=0).abs().max()))
    near = min(NEAR * size, CLOSER * measure_error(found, exact.context))
    return next((one for one in list_wrong_contexts(exact, other) if is_near(found, one.context, near)), None)


def is_near(found: Tensor, context: Tensor, near: float) -> bool:
    """Return whether two contexts are equal, where NaN equals NaN."""
    nan = found.isnan().cpu()
    if not torch.equal(nan, context.isnan().cpu()):
        return False
    return measure_error(found.nan_to_num(), context.nan_to_num()) < near


def list_wrong_contexts(exact: AttentionFormula, other: Tensor | None) -> Iterator[WrongContext]:
    """Yield the contexts of known mistakes."""
    yield from list_wrong_rows(exact)
    yield from list_wrong_heads(exact)
    yield from list_wrong_scales(exact)
    yield from list_wrong_masks(exact, other)
    yield from list_wrong_blocks(exact)
    k, v = exact.k, exact.v
    yield WrongContext("wrong roles", "keys and values are exchanged", ROLES, replace(exact, k=v, v=k).context)
    if exact.q.shape == k.shape:
        yield WrongContext("wrong roles", "queries and keys are exchanged", ROLES, replace(exact, q=k, k=exact.q).context)
    numbers = (exact.masked - exact.masked.amax(-1, keepdim=True)).exp()
    cure = "Divide by the sum of each row after the last block."
    yield WrongContext("not normalised", NORMS["exp less its maximum"], cure, numbers @ share(v, len(exact.q[0])))


def list_wrong_rows(exact: AttentionFormula) -> Iterator[WrongContext]:
    """Yield what a kernel gives for rows that see nothing: NaN, or the mean of all values."""
    if exact.blind.any():
        for does, row in (
            ("NaN", torch.nan),
            ("the mean of all values", share(exact.v, len(exact.q[0])).mean(-2, True)),
        ):
            context = torch.where(exact.blind, row, exact.context)
            yield WrongContext("blind row", f"the context of a row that sees nothing is {does}, not 0", EMPTY, context)


def list_wrong_heads(exact: AttentionFormula) -> Iterator[WrongContext]:
    """Yield contexts of key heads in the wrong order, or of the first alone."""
    h, g = len(exact.q[0]), len(exact.k[0])
    if 1 < g < h:
        for how in ("tiled", "first"):
            k, v = ((x.repeat(1, h // g, 1, 1) if how == "tiled" else x[:, :1]) for x in (exact.k, exact.v))
            wrong = describe_mixed_heads(how)
            yield WrongContext(wrong.kind, wrong.does, wrong.cure, replace(exact, k=k, v=v).context)


def list_wrong_scales(exact: AttentionFormula) -> Iterator[WrongContext]:
    """Yield contexts with another factor on the scores."""
    d, cure = exact.q.shape[-1], SCALE.format(exact.scale)
    scales = {
        "the scores are not scaled": 1.0,
        f"the scores are divided by {d}: by √{d} twice, or by d instead of √d": 1 / d,
        f"the scores are multiplied by √{d}": d**0.5,
        "the power is of 2, exp2, of scores that are not multiplied by log2(e)": exact.scale * LN2,
        "the scores are multiplied by log2(e), but the power is of e": exact.scale / LN2,
        "the scores are scaled twice": exact.scale**2,
        "the scale is that of the width rounded up to a power of two": 2.0 ** (-(d - 1).bit_length() / 2),
    }
    for does, scale in scales.items():
        if abs(scale / exact.scale - 1) > NEAR:
            yield WrongContext("wrong scale", does, cure, replace(exact, scale=scale).context)


def list_wrong_masks(exact: AttentionFormula, other: Tensor | None) -> Iterator[WrongContext]:
    """Yield contexts with another mask."""
    if other is not None and not torch.equal(other, exact.seen):
        does = "queries stand at the other end of the keys: the diagonal of the mask ends in another corner"
        cure = 'Pass offset="last" if the last query meets the last key, as in FlashAttention, or offset=0 as in torch.'
        masked = replace(exact, seen=other)
        yield WrongContext("wrong mask", does, cure, masked.context)
        with_nan = masked.context.masked_fill(masked.blind, torch.nan)
        yield WrongContext("wrong mask", f"{does}; rows that see nothing are NaN", cure, with_nan)
    if not exact.seen.all():
        every = torch.ones_like(exact.seen)
        for name, seen in (
            ("none", every),
            ("inverted", ~exact.seen),
            ("beyond", F.pad(exact.seen, (1, 0))[..., :-1] | exact.seen),
        ):
            yield WrongContext(*MASKS[name], replace(exact, seen=seen).context)
        scores = exact.scaled * exact.seen
        yield WrongContext(*MASKS["zero"], scores.softmax(-1) @ share(exact.v, len(exact.q[0])))


def list_wrong_blocks(exact: AttentionFormula) -> Iterator[WrongContext]:
    """Yield contexts in which the last, shorter block of keys is dropped, or filled up with keys of zeros."""
    keys = exact.k.shape[-2]
    for block in BLOCKS:
        rest = keys % block
        if rest and keys > block:
            seen = exact.seen & (torch.arange(keys, device=exact.seen.device) < keys - rest)
            does = f"the last {rest} of {keys} keys have no weight: the last block of {block}, which is not full, is left out"
            yield WrongContext("wrong mask", does, BOUND, replace(exact, seen=seen).context)
        if rest:
            k, v = (F.pad(x, (0, 0, 0, block - rest)) for x in (exact.k, exact.v))
            does = f"{block - rest} keys of zeros that fill up a block of {block} have weight"
            filled = replace(exact, k=k, v=v, seen=F.pad(exact.seen, (0, block - rest), value=True))
            yield WrongContext("not normalised", does, BOUND, filled.context)
