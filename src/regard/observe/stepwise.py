"""Which calls are steps of one decoder: an RNN's, which looks at the same keys once for each word that it writes."""

import math

import torch
from torch import Tensor

from regard.observe.strand import Rows, Strand, fitting


def continued(strand: Strand, q: Tensor, k: Tensor, told: Tensor | None) -> Rows | None:
    """Which row of a strand's last step each row of a call continues; None where it looks at other keys, or begins again.

    Keys are the same to the bit, or they are others. A decoder begins again where its first query comes back. Where rows
    have the same keys, as those of a search do, `told` says which of them live on.
    """
    if torch.equal(q, strand.pieces[0].q):
        return None
    return same_keys(strand.joined(strand.total, strand.pieces[-1].step), k, told)


def same_keys(ours: Tensor, theirs: Tensor, told: Tensor | None) -> Rows | None:
    """Which row of ours (b, g, k, d) each row of theirs is, to the bit; None where one of them is none."""
    if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
        return None
    if told is not None and fitting(ours, theirs, told):
        return Rows(told, 0.0)
    if torch.equal(ours, theirs):
        return Rows(None, 0.0)
    found = []
    for row in theirs:
        same = (ours == row).flatten(1).all(1).nonzero()
        if not len(same):
            return None
        found.append(same[0, 0])
    return Rows(torch.stack(found), 0.0)


def alike(k: Tensor) -> bool:
    """Return whether some rows of keys (b, g, k, d) are the same but for rounding, as those of a search are.

    A product may round one row in two ways, at two places of a batch. Rounding leaves more than half of the digits of a key's
    largest number right; keys of two words share fewer.
    """
    pairs = torch.ones(len(k), len(k), dtype=torch.bool, device=k.device).tril(-1)
    half_of_digits = math.sqrt(torch.finfo(k.dtype).eps)
    for keys in k.double().unbind(2):  # (b, g, d)
        rows = keys.flatten(1)
        apart = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") / math.sqrt(rows.shape[1])
        pairs &= apart <= half_of_digits * rows.abs().amax()
        if not pairs.any():
            return False
    return len(k) > 1
