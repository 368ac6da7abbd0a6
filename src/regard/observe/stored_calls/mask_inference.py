"""Inference of the rule that a mask tensor follows: a value that needs no T x T table."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset, Or
from regard.mechanism.masks import Causal, Documents, Given, Window

ROWS = 1024  # queries per block
InferredRule = tuple[Mask, int, Tensor | None]  # rule, offset, bias


def infer_rule(mask: Tensor, q: Tensor, k: Tensor) -> InferredRule:
    """Return the rule, offset and bias of a mask with four axes: True is visible, or numbers that are added to the scores."""
    queries, keys = q.shape[2], k.shape[2]
    if mask.dtype == torch.bool:
        return *infer_table_rule(mask, queries, keys), None
    smallest = torch.finfo(mask.dtype).min
    hidden = mask <= smallest / 2
    if (mask.masked_fill(hidden, 0) != 0).any():
        return EVERYTHING, 0, mask.detach().clone()  # numbers other than a minimum: a bias
    rule, offset = infer_table_rule(~hidden, queries, keys)
    # a finite minimum on all keys of a row that -inf does not hide swallows their scores: they have equal weights
    blind = hidden.all(-1, keepdim=True)
    equal = blind & (mask != -torch.inf)
    if not equal.any():
        return rule, offset, None
    shown = blind if torch.equal(equal, blind.expand_as(equal)) else equal
    return (
        rule | Given.from_shared_table(shown),
        offset,
        torch.zeros_like(blind, dtype=mask.dtype).masked_fill_(blind, smallest),
    )


def infer_rule_with_bias(mask: Tensor | None, causal: bool, bias: Tensor, q: Tensor, k: Tensor) -> InferredRule:
    """Return the rule, offset and bias of a mask and a position bias that is added to the scores.

    Where a bool mask hides, the smallest number of the dtype is added instead.
    """
    if mask is None:
        return (Causal() if causal else EVERYTHING), 0, bias
    rule, offset, uniform = infer_rule(mask, q, k)
    if mask.dtype != torch.bool:
        return (EVERYTHING, 0, bias + mask) if uniform is not None or rule == EVERYTHING else (rule, offset, bias)
    if mask.any(-1).all():
        return rule, offset, bias
    return EVERYTHING, 0, torch.where(mask, bias, torch.finfo(q.dtype).min)


def infer_table_rule(seen: Tensor, queries: int, keys: int) -> tuple[Mask, int]:
    """Return the rule of a bool table with four axes, and the offset of its first query.

    The rule is the table itself if no simpler rule fits.
    """
    if seen.all():
        return EVERYTHING, 0
    if seen.shape[2] == 1 or (seen == seen[:, :, :1]).all():
        return Given.from_shared_table(seen[:, :, :1].clone()), 0
    if seen.shape[2:] == (queries, keys):
        parts = torch.arange(queries, device=seen.device).split(ROWS)
        for rule, offset in propose_rules(seen):
            found = fit_rule(rule, offset, ((part, seen[:, :, part]) for part in parts))
            if found is not None:
                return found, offset
    return Given.from_shared_table(seen.clone()), 0


def propose_rules(seen: Tensor) -> Iterator[tuple[Mask, int]]:
    """Yield the rules and offsets that a table may follow, apart from keys that it hides from all queries."""
    queries, keys = seen.shape[2:]
    ever = seen.any(2).flatten(0, 1).any(0).nonzero()
    offsets = dict.fromkeys((keys - queries, 0, max(int(ever.max()) + 1 - queries, 0) if len(ever) else 0))
    for offset in offsets:
        yield Causal(), offset
    for row in (queries - 1, queries // 2):
        there = seen[:, :, row].flatten(0, 1).any(0).nonzero()
        if len(there):
            first, last = int(there[0]), int(there[-1])
            for offset in offsets:
                position = row + offset
                if first <= position:
                    yield Causal() & Window(position - first), offset
                    yield Window(position - first, max(last - position, 0)), offset
    if queries == keys:
        ids = find_first_visible(seen, torch.arange(queries, device=seen.device))
        yield Causal() & Documents(ids), 0
        yield Documents(ids), 0


def find_first_visible(seen: Tensor, queries: Tensor) -> Tensor:
    """Return for each query, by index, the first key that it sees, (b, q): an id of its document or chunk.

    A query that sees nothing gets an id of its own.
    """
    firsts = seen[:, 0].to(torch.uint8).argmax(-1)  # the first of equal numbers
    return torch.where(seen[:, 0].any(-1), firsts, seen.shape[3] + queries)


def fit_rule(rule: Mask, offset: int, parts: Iterable[tuple[Tensor, Tensor]]) -> Mask | None:
    """Return the rule, combined with the keys that a table hides from all queries; None if that does not give the table.

    Parts are queries by index, (n,), and their rows of the table, (b or 1, h or 1, n, k).
    """
    shown: Tensor | None = None
    hidden: Tensor | None = None
    for queries, here in parts:
        table = rule.block(queries, torch.arange(here.shape[-1], device=here.device), offset)
        if (here & ~table).any():
            return None
        both = here.any(2, keepdim=True), (table & ~here).any(2, keepdim=True)
        shown, hidden = both if shown is None or hidden is None else (shown | both[0], hidden | both[1])
    if shown is None or hidden is None or (shown & hidden).any():
        return None  # a key is hidden from some of the queries to which the rule shows it
    return rule & Given.from_shared_table(~hidden) if hidden.any() else rule


def find_visible_end(mask: Mask, queries: int, keys: int, offset: Offset) -> int:
    """Return the index of the last key that any query sees, plus one.

    A mask with a finite minimum makes blind rows uniform over all slots of a cache. So in a rule joined by |, rows that see
    every key count only if there are no others.
    """
    if mask == EVERYTHING:
        return keys
    device = offset.device if isinstance(offset, Tensor) else None
    every = torch.arange(keys, device=device)
    most = 0
    for part in torch.arange(queries, device=device).split(ROWS):
        seen = mask.block(part, every, offset).expand(-1, -1, -1, keys)
        seen = seen & ~seen.all(-1, keepdim=True) if isinstance(mask, Or) else seen
        there = seen.flatten(0, -2).any(0).nonzero()
        most = max(most, int(there.max()) + 1 if len(there) else 0)
    return most or keys
