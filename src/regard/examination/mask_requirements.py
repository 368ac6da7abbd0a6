"""What an expectation requires of the inputs, how many tokens show its bounds, and which rule a measured table follows."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard.examination.report import Unknown
from regard.mechanism import EVERYTHING, Causal, Given, Mask, Prefix, Window
from regard.mechanism.mask_algebra import Offset
from regard.observe.stored_calls import mask_inference

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
    return max([2, *(bound + 2 for bound in mask.bounds)])


def is_shown(mask: Mask, t: int, offset: Offset = 0) -> bool:
    """Return whether t tokens tell a rule from each that is easily mistaken for it.

    Documents, which fit one number of tokens, may hide every bound of a rule beside them. A table states all that it hides.
    """
    free, most = release_tables(mask), max(t, count_required_tokens(mask))
    return has_table(mask) or not any(
        differ(free, release_tables(other), most, offset) and not differ(mask, other, t, offset)
        for other in list_similar_masks(mask)
    )


def describe_short_sample(mask: Mask, t: int) -> Unknown:
    """Return that a rule cannot be told from others with t tokens, and how many show it."""
    what = "of" if mask.key_count is None else "and expects= with a document of"
    needs = f"sample= {what} at least {count_required_tokens(mask):,} tokens"
    return Unknown(f"whether {mask} holds: with {t} tokens it cannot be told from other rules", needs, is_required=True)


def release_tables(mask: Mask) -> Mask:
    """Return a rule with Everything() in place of each part that fits one number of keys."""
    if mask.parts:
        return mask.transform_parts(release_tables)
    return mask if mask.key_count is None else EVERYTHING


def differ(one: Mask, other: Mask, t: int, offset: Offset) -> bool:
    """Return whether two rules differ for t tokens, in the rows where that shows."""
    rows, keys = torch.tensor(choose_queries(t, one & other)), torch.arange(t)
    return bool((one.for_keys(t).block(rows, keys, offset) ^ other.for_keys(t).block(rows, keys, offset)).any())


def list_similar_masks(mask: Mask) -> Iterator[Mask]:
    """Yield masks that are easily mistaken for this one: with a bound one off or left out, or only a part of it."""
    yield from mask.parts
    for part in mask.parts:
        for other in list_similar_masks(part):
            yield mask.transform_parts(lambda one, part=part, other=other: other if one is part else one)  # type: ignore[misc]
    if not mask.parts:
        yield from mask.similar or (Causal(),)


def infer_mask(seen: Tensor, judged: Tensor, rule: Mask, offset: Offset = 0) -> Mask | None:
    """Return the simplest mask that a table follows where it was judged, both bool (b, q, k); None if none does.

    Those that are easily mistaken for the expected rule come first.
    """
    b, q, k = seen.shape
    filled = torch.where(judged, seen, expand_mask(rule, b, q, k, offset))
    inferred, first = mask_inference.infer_table_rule(filled[:, None], q, k)
    masks = [*list_similar_masks(rule), EVERYTHING, *([inferred] if offset == first and not has_table(inferred) else [])]
    masks.append(Causal() | Prefix(int(filled[0, 0].sum())))
    return next((mask for mask in masks if ((expand_mask(mask, b, q, k, offset) == seen) | ~judged).all()), None)


def has_table(mask: Mask) -> bool:
    """Return whether a part of a mask is a table."""
    return isinstance(mask, Given) or any(has_table(part) for part in mask.parts)


def make_later_table(q: int, k: int, offset: Offset = 0) -> Tensor:
    """Return which keys come after each query's own position, bool (q, k) or (b, q, k)."""
    table = ~Causal().table(q, k, offset)
    return table[:, 0] if table.dim() == 4 else table


def make_own_table(q: int, k: int, offset: Offset = 0) -> Tensor:
    """Return which key is at each query's own position, bool (q, k) or (b, q, k)."""
    table = Window(0, 0).table(q, k, offset)
    return table[:, 0] if table.dim() == 4 else table


def find_future(rule: Mask, size: Sequence[int], offset: Offset = 0) -> Tensor:
    """Return the keys that a rule hides from queries because they come later, bool (b, q, k).

    Those that only padding hides are left out, as are those of a query that may see other later keys, and of a rule that is
    the same in both directions, as of documents.
    """
    b, q, k = size
    rest = rule.remove_padding()
    if rest is None:
        return torch.zeros(b, q, k, dtype=torch.bool)
    return find_future_pairs(expand_mask(rest, b, q, k, offset), make_later_table(q, k, offset))


def find_future_pairs(allowed: Tensor, later: Tensor) -> Tensor:
    """Return the pairs that a table, bool (..., q, k), hides because the key comes later."""
    is_one_sided = allowed.shape[-1] != allowed.shape[-2] or not torch.equal(allowed, allowed.mT)
    return later & ~allowed & ~(later & allowed).any(-1, keepdim=True) & is_one_sided


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
