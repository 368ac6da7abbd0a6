"""What an expectation asks of the inputs: how many tokens show its bounds, and whether it is for one batch only."""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.mechanism import Causal, Documents, Given, Mask, Padding, Prefix, Window
from regard.mechanism.rule import And, Not, Offset, Pair

USUAL, FEW, MOST = 6, 16, 300  # tokens: as a rule, of which every pair is measured, at most


def parts(rule: Mask) -> Iterator[Mask]:
    """The plain rules that a rule is composed of."""
    if isinstance(rule, Pair):
        yield from parts(rule.one)
        yield from parts(rule.other)
    elif isinstance(rule, Not):
        yield from parts(rule.rule)
    else:
        yield rule


def bound(rule: Mask) -> bool:
    """Whether a rule speaks of one batch: of its padding, its documents, or entry by entry."""
    return any(isinstance(part, (Padding, Documents, Given)) for part in parts(rule))


def batch(rule: Mask) -> int:
    """How many sequences show a rule: those that it tells apart, or two; one where it is the padding of one."""
    alone = any(isinstance(part, Padding) and len(part.lengths) == 1 for part in parts(rule))
    return rule.batch if rule.batch > 1 else 1 if alone else 2


def lengths(rule: Mask) -> list[int]:
    """Numbers of keys that show a rule, the first the best."""
    fixed = [part.keys.shape[-1] for part in parts(rule) if isinstance(part, Documents)]
    fixed += [part.given.shape[-1] for part in parts(rule) if isinstance(part, Given) and part.given.shape[-1] > 1]
    if fixed:
        return fixed[:1]
    padded = [max(part.lengths, default=0) for part in parts(rule) if isinstance(part, Padding)]
    if padded:
        return [*range(max(padded) + 1, max(padded) + 9), max(padded)]
    return [min(MOST, max([USUAL, *(side + 3 for side in sides(rule))]))]


def sides(rule: Mask) -> list[int]:
    """The numbers of tokens at which a rule turns."""
    windows = [side for part in parts(rule) if isinstance(part, Window) for side in (part.left, part.right) if side is not None]
    return windows + [part.n for part in parts(rule) if isinstance(part, Prefix)]


def padding(rule: Mask) -> Padding | None:
    """The padding that a rule asks for beside everything else; None where there is none."""
    if isinstance(rule, And):
        return padding(rule.one) or padding(rule.other)
    return rule if isinstance(rule, Padding) else None


def without_padding(rule: Mask) -> Mask | None:
    """What else it asks for; None where it asks for padding alone."""
    if isinstance(rule, And):
        one, other = without_padding(rule.one), without_padding(rule.other)
        return other if one is None else one if other is None else one & other
    return None if isinstance(rule, Padding) else rule


def later(q: int, k: int, offset: Offset = 0) -> Tensor:
    """Which keys come after each query's own position, bool (q, k) or (b, q, k)."""
    table = ~Causal().table(q, k, offset)
    return table[:, 0] if table.dim() == 4 else table


def own(q: int, k: int, offset: Offset = 0) -> Tensor:
    """Which key is each query's own, bool (q, k) or (b, q, k)."""
    table = Window(0, 0).table(q, k, offset)
    return table[:, 0] if table.dim() == 4 else table


def chosen(t: int, rule: Mask, most: int = FEW) -> list[int]:
    """The queries that are worth a measurement among t: all of a few; of many the ends, and where a rule turns."""
    if t <= most:
        return list(range(t))
    turns = [turn + step for turn in sides(rule) for step in (-1, 0, 1, 2)]
    spaced = torch.linspace(0, t - 1, most // 2).long().tolist()
    return sorted({i for i in [*turns, *spaced, 1, t - 2] if 0 <= i < t})


def written(rule: Mask, b: int, q: int, k: int, offset: Offset = 0) -> Tensor:
    """A rule written out for a batch, bool (b, q, k); any head that may see is enough."""
    table = rule.table(q, k, offset)
    return table[(None,) * (4 - table.dim())].any(1).expand(b, q, k)
