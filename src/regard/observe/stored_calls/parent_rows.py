"""Which batch row of an earlier step each row continues, by the keys of both or as the run states it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SIMILAR = 0.3  # relative to a key's norm: tolerance for keys read back from a cache that rounds


class RowMatch(NamedTuple):
    """The parent row of each batch row, and the largest relative distance to it."""

    parents: Tensor | None  # parent of each row; None if no row moved
    distance: float


def reorder_rows(parent_rows: Mapping[int, Tensor], x: Tensor, made: int, wanted: int) -> Tensor:
    """Reorder the batch rows of x, made at one step, to those of a later step; parent_rows are those of the run, by step."""
    rows = compose_parent_rows(parent_rows, None, made, wanted)
    return x if rows is None else x[rows.to(x.device)]


def compose_parent_rows(parent_rows: Mapping[int, Tensor], rows: Tensor | None, made: int, wanted: int) -> Tensor | None:
    """Return the rows at one step from which rows of a later step descend; None stands for all rows in their order.

    It takes as long as there are steps between, or steps with parent rows if those are fewer.
    """
    steps: Sequence[int] = range(wanted, made, -1)
    if len(steps) > len(parent_rows):
        steps = sorted((step for step in parent_rows if step in steps), reverse=True)
    for step in steps:
        parents = parent_rows.get(step)
        if parents is not None:
            rows = parents if rows is None else parents[rows]
    return rows


def match_rows(ours: Tensor, theirs: Tensor, parents: Tensor | None = None) -> RowMatch | None:
    """Return the row of `ours` that each row of `theirs`, (b, g, d), matches; None if one of them matches no row.

    `parents`, the parent rows if known, is used where it fits to the bit.
    """
    if parents is not None and is_exact_match(ours, theirs, parents):
        return RowMatch(parents, 0.0)
    if ours.shape == theirs.shape and torch.equal(ours, theirs):
        return RowMatch(None, 0.0)
    if ours.shape[1:] != theirs.shape[1:]:
        return None
    apart = measure_rows(ours, theirs)
    nearest, rows = apart.min(1)
    size = theirs.float().flatten(1).norm(dim=-1)
    if (nearest > SIMILAR * size).any():
        return None
    own = len(rows) == len(ours) and torch.equal(rows, torch.arange(len(rows), device=rows.device))
    return RowMatch(None if own else rows, float((nearest / size.clamp(min=torch.finfo(size.dtype).tiny)).max()))


def measure_rows(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the distances (b theirs, b ours) of rows."""
    both = theirs.float().flatten(1), ours.float().flatten(1)
    return torch.cdist(*both, compute_mode="donot_use_mm_for_euclid_dist")


def is_exact_match(ours: Tensor, theirs: Tensor, parents: Tensor) -> bool:
    """Return whether the rows `parents` of `ours` equal `theirs`, to the bit."""
    return len(parents) == len(theirs) and int(parents.max()) < len(ours) and torch.equal(ours[parents], theirs)


def has_equal_rows(k: Tensor) -> bool:
    """Return whether some rows of keys (b, g, k, d) are the same up to rounding, as those of a beam search are.

    A matrix product may round the same row differently at two places of a batch. Rounding keeps more than half of the digits of
    a key's largest number; keys of two words share fewer.
    """
    pairs = torch.ones(len(k), len(k), dtype=torch.bool, device=k.device).tril(-1)
    half_of_digits = math.sqrt(torch.finfo(k.dtype).eps)
    for keys in k.double().unbind(2):  # (b, g, d)
        rows = keys.flatten(1)
        distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") / math.sqrt(rows.shape[1])
        pairs &= distances <= half_of_digits * rows.abs().amax()
        if not pairs.any():
            return False
    return len(k) > 1
