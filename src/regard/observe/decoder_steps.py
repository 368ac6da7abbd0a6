"""Detection of decoder steps: an RNN's decoder attends to the same keys once for each word that it writes."""

import math

import torch
from torch import Tensor

from regard.observe.kv_history import KVHistory, RowMatch, is_exact_match


def match_step(history: KVHistory, q: Tensor, k: Tensor, parents: Tensor | None) -> RowMatch | None:
    """Return the parent row, in a history's last step, of each row of a call; None if the call does not continue it.

    Keys must be equal to the bit. The first query again means that the decoder starts again. Where rows have the same keys, as
    those of a beam search do, `parents` states the parent rows.
    """
    if torch.equal(q, history.stored_calls[0].q):
        return None
    return match_keys(history.join_keys(history.total, history.stored_calls[-1].step), k, parents)


def match_keys(ours: Tensor, theirs: Tensor, parents: Tensor | None) -> RowMatch | None:
    """Return the row of `ours`, (b, g, k, d), that each row of `theirs` equals to the bit; None if one equals no row."""
    if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
        return None
    if parents is not None and is_exact_match(ours, theirs, parents):
        return RowMatch(parents, 0.0)
    if torch.equal(ours, theirs):
        return RowMatch(None, 0.0)
    found = []
    for row in theirs:
        same = (ours == row).flatten(1).all(1).nonzero()
        if not len(same):
            return None
        found.append(same[0, 0])
    return RowMatch(torch.stack(found), 0.0)


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
