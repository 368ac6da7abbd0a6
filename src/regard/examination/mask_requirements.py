"""What an expectation requires of the inputs: how many tokens show its bounds, and whether it is for one batch only."""

import torch
from torch import Tensor

from regard.mechanism import Causal, Mask, Window
from regard.mechanism.mask_algebra import Offset

USUAL, FEW, MOST = 6, 16, 300  # tokens: the usual number, the most with every pair measured, the most of all


def choose_batch_size(mask: Mask) -> int:
    """Return how many sequences show a mask: those that it distinguishes, or two; one for the padding of one sequence."""
    return mask.batch if mask.batch > 1 else 1 if mask.padded_lengths else 2


def choose_token_counts(mask: Mask) -> list[int]:
    """Return numbers of keys that show a mask, the best first."""
    if mask.key_count is not None:
        return [mask.key_count]
    if mask.padded_lengths:
        longest = max(mask.padded_lengths)
        return [*range(longest + 1, longest + 9), longest]
    return [min(MOST, max([USUAL, *(bound + 3 for bound in mask.bounds)]))]


def count_required_tokens(mask: Mask) -> int:
    """Return the least number of keys that shows a mask: two, or more than its bounds."""
    return mask.key_count or max([2, *(bound + 2 for bound in mask.bounds)])


def make_later_table(q: int, k: int, offset: Offset = 0) -> Tensor:
    """Return which keys come after each query's own position, bool (q, k) or (b, q, k)."""
    table = ~Causal().table(q, k, offset)
    return table[:, 0] if table.dim() == 4 else table


def make_own_table(q: int, k: int, offset: Offset = 0) -> Tensor:
    """Return which key is at each query's own position, bool (q, k) or (b, q, k)."""
    table = Window(0, 0).table(q, k, offset)
    return table[:, 0] if table.dim() == 4 else table


def choose_queries(t: int, rule: Mask, most: int = FEW) -> list[int]:
    """Return the queries to measure among t: all if few; else the ends, spaced ones, and those where a rule changes."""
    if t <= most:
        return list(range(t))
    turns = [turn + step for turn in rule.bounds for step in (-1, 0, 1, 2)]
    spaced = torch.linspace(0, t - 1, most // 2).long().tolist()
    return sorted({i for i in [*turns, *spaced, 1, t - 2] if 0 <= i < t})


def expand_mask(rule: Mask, b: int, q: int, k: int, offset: Offset = 0) -> Tensor:
    """Return a rule as a table for a batch, bool (b, q, k), True if any head may see."""
    table = rule.table(q, k, offset)
    return table[(None,) * (4 - table.dim())].any(1).expand(b, q, k)


def find_real_queries(rule: Mask, b: int, q: int, k: int) -> Tensor:
    """Return the queries that are not padding themselves, bool (b, q, 1); the others are not checked."""
    if rule.padding is None:
        return torch.ones(b, q, 1, dtype=torch.bool)
    return expand_mask(rule.padding, b, 1, k)[:, 0, k - q :].unsqueeze(-1)
