"""Where the keys of a cache continue a history: the keys of both are compared, since few caches state what they hold."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.observe.interception.plain_tensors import sum_bits
from regard.observe.stored_calls.kv_history import KVHistory
from regard.observe.stored_calls.parent_rows import (
    SIMILAR,
    RowMatch,
    has_equal_rows,
    match_rows,
    measure_rows,
)

KEY_TOLERANCE = 1e-3  # relative to a key's norm: a larger difference between written and read keys means that the cache rounds
NEAR = 1e-3  # relative to the norm of keys: tolerance for keys that are equal but for rounding


class CacheMatch(NamedTuple):
    """Where the keys of a cache continue a history."""

    known: int  # number of the history's keys that remain
    first: int  # index in the history of the cache's first key
    slot: int  # index of the cache's first new key
    rows: Tensor | None  # the parent of each batch row; None if no row moved
    distance: float  # largest relative distance of a key read back from the key written
    is_pruned: bool = False  # whether the cache has dropped or changed keys among those that it holds
    places: Tensor | None = None  # (b, g, n), the index in the history of each key before the new ones, if some are dropped


def match_cache(
    history: KVHistory,
    k: Tensor,
    new: int,
    cast_and_select: Callable[[Tensor], Tensor],
    parents: Tensor | None = None,
    length: int | None = None,
) -> CacheMatch | None:
    """Return where the keys of a cache (b, g, n, d) continue a history; None if they do not.

    `new` of the keys are new. `parents` states the parent row of each row, if known, for rows that match several, and
    `length` the number of tokens that the cache stated to hold before.
    """

    def get_keys(count: int) -> Tensor:
        return cast_and_select(k[:, :, :count])

    before = k.shape[2] - new
    stated = None if length is None or history.start is None else length - history.start
    found = []
    for known in propose_lengths(history, before, stated):
        slot = min(known, before)  # of the first new key
        same = match_rows(history.get_key(known - 1), cast_and_select(k[:, :, slot - 1 : slot])[:, :, 0], parents)
        if same is not None:
            found.append(CacheMatch(known, known - slot, slot, *same))
            if known == stated and not same.distance:
                break
    nearest = min((match.distance for match in found), default=0.0)  # keys of two words may be similar
    best = [match for match in found if not match.distance > nearest]  # NaN is not
    if not best:
        return None
    match = best[0] if len(best) == 1 else min(best, key=lambda match: measure_distance(history, match, get_keys(before)))
    match = check_oldest_key(history, match_all_keys(history, match, get_keys), get_keys)
    return check_cut_keys(history, match, get_keys) if match.known < history.total else match


def locate_keys(history: KVHistory, k: Tensor) -> CacheMatch | None:
    """Return where the keys (b, g, n, d) of a cache that has dropped others are in a history, in any order in each head.

    None if one is not there, or there twice.
    """
    ours = history.join_newest_keys(history.total, history.stored_calls[-1].step)
    if (ours.shape[:2], ours.shape[3], ours.dtype) != (k.shape[:2], k.shape[3], k.dtype) or not k.shape[2]:
        return None
    known, order = sum_bits(ours).sort(-1)
    wanted = sum_bits(k)
    starts, stops = (torch.searchsorted(known, wanted, right=right) for right in (False, True))
    if (stops - starts != 1).any():
        return None
    places = order.gather(-1, starts)
    if not torch.equal(ours.gather(2, places.unsqueeze(-1).expand_as(k)), k):
        return None
    return CacheMatch(history.total, 0, k.shape[2], None, 0.0, places=places)


def has_hidden_keys(history: KVHistory, k: Tensor, new: int, stop: int, cast_and_select: Callable[[Tensor], Tensor]) -> bool:
    """Return whether the slots of a cache (b, g, n, d) behind a history hold `new` keys that their queries do not see.

    The keys before `stop`, the last ones that are seen, are then those of the history, and not new. Slots that tokens had
    which were cut tell nothing.
    """
    if history.total + new <= max(stop, history.longest) or not k[:, :, history.total : history.total + new].any(-1).all():
        return False
    start, stop = max(0, stop - new), min(stop, history.total)
    keys = history.join_newest_keys(stop, history.stored_calls[-1].step)[:, :, start:]
    return torch.equal(keys, cast_and_select(k[:, :, start:stop]))


def match_all_keys(history: KVHistory, match: CacheMatch, get_keys: Callable[[int], Tensor]) -> CacheMatch:
    """Return a match with the rows that earlier keys of a cache show, where several rows have the same last key."""
    last = history.get_key(match.known - 1)
    if len(last) < 2 or not has_equal_rows(last.unsqueeze(2)):
        return match
    theirs, identity = get_keys(match.slot), torch.arange(len(last), device=last.device)
    if match.rows is None and has_same_keys(history, match, theirs):  # rows that stay equal would be measured at each step
        return match
    rows = (identity if match.rows is None else match.rows)[: len(theirs)]
    apart = last.new_zeros(len(theirs), len(last), dtype=torch.float32)
    for start, keys in history.iterate_newest_keys(match.known, history.stored_calls[-1].step):
        part = theirs[:, :, max(start - match.first, 0) : start - match.first + keys.shape[2]]
        apart += measure_rows(keys[:, :, keys.shape[2] - part.shape[2] :], part)
        is_near = apart <= apart.amin(1, keepdim=True) + NEAR * measure_rows(part[:1] * 0, part)
        if start <= match.first or bool((is_near.sum(1) == 1).all()):
            break
    rows = torch.where(is_near.gather(1, rows.unsqueeze(1)).squeeze(1), rows, apart.argmin(1))
    return match._replace(rows=None if torch.equal(rows, identity) else rows)


def has_same_keys(history: KVHistory, match: CacheMatch, k: Tensor) -> bool:
    """Return whether the keys of a cache (b, g, n, d) equal those that they match in the history, to the bit."""
    keys = join_matched_keys(history, match)
    theirs = k[:, :, : keys.shape[2]].to(keys.dtype)
    return keys.shape == theirs.shape and torch.equal(keys, theirs)


def measure_distance(history: KVHistory, match: CacheMatch, k: Tensor) -> float:
    """Return how far the keys of a cache are from those that they match in the history, relative to their norm."""
    keys = join_matched_keys(history, match)
    theirs = k[:, :, : keys.shape[2]].float()
    size = theirs.norm().clamp(min=torch.finfo(theirs.dtype).tiny)
    return float((keys.float() - theirs).norm() / size)


def join_matched_keys(history: KVHistory, match: CacheMatch) -> Tensor:
    """Return the keys of the history that those of a cache match, in the rows of the cache."""
    keys = history.join_newest_keys(match.known, history.stored_calls[-1].step)[:, :, match.first :]
    return keys if match.rows is None else keys[match.rows]


def check_oldest_key(history: KVHistory, match: CacheMatch, get_keys: Callable[[int], Tensor]) -> CacheMatch:
    """Return a match pruned if a cache's oldest key is another one, with the distance of it if the cache rounds it.

    The keys of a cache are in order. If it ends as the history does and has fewer keys, they are the last ones only if the
    oldest is. If it has all of them, it may only change them: then the number of checks is the logarithm of that of steps.
    """
    steps = len(history.stored_calls)
    if match.slot < 2 or (not match.first and steps & (steps - 1)):
        return match
    oldest = get_keys(1)[:, :, 0]
    same = match_rows(history.get_key(match.first), oldest, match.rows)
    if same is None:
        return match._replace(is_pruned=True)
    if not same.distance > KEY_TOLERANCE:  # NaN is not
        return match
    if match.first and not is_nearest(history, match, same, oldest):
        return match._replace(is_pruned=True)
    return match._replace(distance=max(match.distance, same.distance))


def check_cut_keys(history: KVHistory, match: CacheMatch, get_keys: Callable[[int], Tensor]) -> CacheMatch:
    """Return a match pruned if a cache does not hold the history's first keys, to which it seems to have been cut.

    A ring of slots, the oldest of which a new key overwrites, has the others at their places. A cache that rounds all
    keys but the last ones differs in most of them.
    """
    theirs = get_keys(match.slot)
    if match.is_pruned or has_same_keys(history, match, theirs):
        return match
    ours, theirs = (x.float().transpose(1, 2).flatten(2) for x in (join_matched_keys(history, match), theirs))
    apart, sizes = (ours - theirs).norm(dim=-1), theirs.norm(dim=-1)  # (b, n)
    is_changed = apart > KEY_TOLERANCE * sizes
    rounds = match.distance > KEY_TOLERANCE or bool((2 * is_changed.sum(1) > is_changed.shape[1]).any())
    return match._replace(is_pruned=bool((apart > SIMILAR * sizes if rounds else is_changed).any()))


def is_nearest(history: KVHistory, match: CacheMatch, same: RowMatch, oldest: Tensor) -> bool:
    """Return whether the key that a match takes for a cache's oldest one (b, g, d) is the nearest to it in each head."""
    keys = history.join_keys(match.known, history.stored_calls[-1].step).float()
    keys = keys if same.parents is None else keys[same.parents]
    apart = (keys - oldest.float().unsqueeze(2)).norm(dim=-1)
    return bool((apart[..., match.first] <= apart.amin(-1)).all())


def propose_lengths(history: KVHistory, before: int, stated: int | None) -> list[int]:
    """Return how many of the history's keys may remain in a cache with room for `before` of them, the likeliest first.

    A cache with less room than the history has keys was cut to its first keys, or holds the last keys of a window.
    """
    proposed = dict.fromkeys([stated or 0, min(history.total, before), history.total])
    return [known for known in proposed if min(known, before) > 0 and known <= history.total]
