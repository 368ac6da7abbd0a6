"""What an expectation requires of the inputs: how many tokens show its bounds, and whether it is for one batch only."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.mechanism import Causal, Documents, Given, Mask, Padding, Prefix, Window
from regard.mechanism.mask_algebra import And, CombinedMask, Not, Offset

USUAL, FEW, MOST = 6, 16, 300  # tokens: the usual number, the most with every pair measured, the most of all


def flatten_mask(rule: Mask) -> Iterator[Mask]:
    """Yield the elementary rules that a rule is composed of."""
    if isinstance(rule, CombinedMask):
        yield from flatten_mask(rule.one)
        yield from flatten_mask(rule.other)
    elif isinstance(rule, Not):
        yield from flatten_mask(rule.mask)
    else:
        yield rule


def is_batch_specific(rule: Mask) -> bool:
    """Return whether a rule is for one batch only: its padding, its documents, or an explicit table."""
    return any(isinstance(part, (Padding, Documents, Given)) for part in flatten_mask(rule))


def choose_batch_size(rule: Mask) -> int:
    """Return how many sequences show a rule: those that it distinguishes, or two; one for the padding of one sequence."""
    alone = any(isinstance(part, Padding) and len(part.lengths) == 1 for part in flatten_mask(rule))
    return rule.batch if rule.batch > 1 else 1 if alone else 2


def choose_token_counts(rule: Mask) -> list[int]:
    """Return numbers of keys that show a rule, the best first."""
    fixed = [part.keys.shape[-1] for part in flatten_mask(rule) if isinstance(part, Documents)]
    fixed += [part.given.shape[-1] for part in flatten_mask(rule) if isinstance(part, Given) and part.given.shape[-1] > 1]
    if fixed:
        return fixed[:1]
    padded = [max(part.lengths, default=0) for part in flatten_mask(rule) if isinstance(part, Padding)]
    if padded:
        return [*range(max(padded) + 1, max(padded) + 9), max(padded)]
    return [min(MOST, max([USUAL, *(side + 3 for side in list_bounds(rule))]))]


def list_bounds(rule: Mask) -> list[int]:
    """Return the numbers of tokens at which a rule changes: sides of windows, lengths of prefixes."""
    windows = [
        side for part in flatten_mask(rule) if isinstance(part, Window) for side in (part.left, part.right) if side is not None
    ]
    return windows + [part.n for part in flatten_mask(rule) if isinstance(part, Prefix)]


def find_padding(rule: Mask) -> Padding | None:
    """Return the padding that a rule requires along with everything else; None if there is none."""
    if isinstance(rule, And):
        return find_padding(rule.one) or find_padding(rule.other)
    return rule if isinstance(rule, Padding) else None


def remove_padding(rule: Mask) -> Mask | None:
    """Return a rule without its padding; None if it requires padding alone."""
    if isinstance(rule, And):
        one, other = remove_padding(rule.one), remove_padding(rule.other)
        return other if one is None else one if other is None else one & other
    return None if isinstance(rule, Padding) else rule


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
    turns = [turn + step for turn in list_bounds(rule) for step in (-1, 0, 1, 2)]
    spaced = torch.linspace(0, t - 1, most // 2).long().tolist()
    return sorted({i for i in [*turns, *spaced, 1, t - 2] if 0 <= i < t})


def expand_mask(rule: Mask, b: int, q: int, k: int, offset: Offset = 0) -> Tensor:
    """Return a rule as a table for a batch, bool (b, q, k), True if any head may see."""
    table = rule.table(q, k, offset)
    return table[(None,) * (4 - table.dim())].any(1).expand(b, q, k)
