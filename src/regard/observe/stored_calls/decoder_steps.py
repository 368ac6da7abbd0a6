"""Detection of decoder steps: an RNN's decoder attends to the same keys once for each word that it writes."""

import torch
from torch import Tensor

from regard.observe.stored_calls.kv_history import KVHistory
from regard.observe.stored_calls.parent_rows import RowMatch, is_exact_match


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
