"""The histories of the calls of one layer joined to one map, side by side or one after the other."""

import itertools
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError
from regard.map import AttentionMap, DifferentiableMap
from regard.mechanism.mask_algebra import EVERYTHING, Mask
from regard.mechanism.masks import Causal, Documents
from regard.mechanism.request import Request
from regard.observe.recorded_runs.part_names import describe_module
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall


class Joining(Enum):
    """How several calls of one visit are joined to one map."""

    WEIGHTS = "calls with equal weights, each on a part of the values, have one map"
    PACKED = "calls on consecutive parts of the tokens are blocks of one map, and see no other part"
    ROWS = "calls of other queries on the same keys are rows of one map"
    PREFIXES = "calls of one query each, on the keys up to it, are rows of one map"


def join_differentiable_maps(histories: list[KVHistory]) -> DifferentiableMap:
    """Return the map of one visit with its graph. Raises ConfigError if it makes several calls of attention."""
    if len(histories) > 1:
        raise ConfigError(
            f"{describe_module(histories[0].name)} calls attention {len(histories)} times in one forward, "
            "so its joined map has no graph."
        )
    return histories[0].build_differentiable_map()


def join_maps(histories: list[KVHistory]) -> AttentionMap:
    """Return the map of one visit; several calls are joined as `find_joining` states. Raises ConfigError if they are no map."""
    maps = [history.build_map() for history in histories]
    if len(maps) == 1:
        return maps[0]
    asked = [one.planes.request for one in maps]
    joining, first, offset = require_joining(histories, asked), asked[0], 0
    rule: Mask = EVERYTHING
    if joining is Joining.WEIGHTS:
        return maps[0]
    if joining is Joining.ROWS:
        q, k = stack_queries(asked)
    elif joining is Joining.PREFIXES:
        q, k, rule, offset = torch.cat([one.q for one in asked], 2), asked[-1].k, Causal(), first.k.shape[2] - 1
    else:
        lengths = torch.tensor([one.shape[2:] for one in maps]).T  # of queries, of keys
        rule = Documents(*(torch.repeat_interleave(torch.arange(len(maps)), each) for each in lengths))
        q, k = torch.cat([one.q for one in asked], 2), torch.cat([one.k for one in asked], 2)
    return AttentionMap(q, k, rule, offset=offset, scale=first.scale, softcap=first.softcap)


def join_values(histories: list[KVHistory]) -> Tensor | None:
    """Return the values (b, g, k, e) of the map of one visit; None if they were not kept.

    Raises ConfigError if its calls are no map, or if rows of it have other values than the others.
    """
    found = [history.join_values() for history in histories]
    kept = [x for x in found if x is not None]
    if not kept or len(kept) < len(found):
        return None
    if len(kept) == 1:
        return kept[0]
    joining = require_joining(histories, [history.build_map().planes.request for history in histories])
    if joining is Joining.ROWS and not all(torch.equal(x, kept[0]) for x in kept):
        raise build_many_calls_error(histories)
    if joining in (Joining.ROWS, Joining.PREFIXES):
        return kept[-1]
    return torch.cat(kept, 3 if joining is Joining.WEIGHTS else 2)


def require_joining(histories: list[KVHistory], asked: list[Request]) -> Joining:
    """Return how the calls of one visit are joined to one map. Raises ConfigError if they are none."""
    found = find_joining(histories, asked)
    if found is None:
        raise build_many_calls_error(histories)
    return found


def find_joining(histories: list[KVHistory], asked: list[Request]) -> Joining | None:
    """Return how the calls of one visit, which ask for these maps, are joined to one; None if they are none."""
    if have_equal_weights(asked):
        return Joining.WEIGHTS
    if len({(one.q.shape[:2], one.q.shape[3], one.scale, one.softcap) for one in asked}) > 1:
        return None
    if any(one.mask != EVERYTHING or one.offset != 0 for one in asked):
        return None
    if any(x is not None for one in asked for x in (one.bias, one.sinks, one.weight)):
        return None
    keys, groups = [one.k for one in asked], {one.k.shape[1] for one in asked}
    if len(groups) == 1 and are_packed(histories):
        return Joining.PACKED
    if len({k.shape[2] for k in keys}) == 1:
        calls = [stored for history in histories for stored in history.stored_calls]
        are_rows = all(stored.part.can_be_rows for stored in calls) and not are_interleaved(calls)
        return Joining.ROWS if are_rows and any(all(has_heads_of(k, columns) for k in keys) for columns in keys) else None
    grows = all(
        k.shape[2] == keys[0].shape[2] + n and one.q.shape[2] == 1 for n, (one, k) in enumerate(zip(asked, keys, strict=True))
    )
    is_prefix = grows and len(groups) == 1 and all(torch.equal(k, keys[-1][:, :, : k.shape[2]]) for k in keys)
    return Joining.PREFIXES if is_prefix else None


def are_interleaved(calls: list[StoredCall]) -> bool:
    """Return whether the queries of a call lie between those of another, as far as that is known."""
    ranges = sorted(call.part.row_range for call in calls if call.part.row_range is not None)
    return len(ranges) == len(calls) and any(end >= start for (_, end), (start, _) in itertools.pairwise(ranges))


def are_packed(histories: list[KVHistory]) -> bool:
    """Return whether several calls are all parts of the tokens of one input, which follow each other."""
    calls = [stored for history in histories for stored in history.stored_calls]
    tokens = {stored.part.packed_tokens for stored in calls}
    queries = sum(len(stored.q) * stored.q.shape[2] for stored in calls)
    keys = sum(len(stored.q) * (stored.stop - stored.first) for stored in calls)
    return tokens == {queries} and (histories[0].kind == "cross" or keys == queries)


def has_heads_of(k: Tensor, columns: Tensor) -> bool:
    """Return whether each head of keys (b, g, k, d) equals a head of other ones, of the same tokens."""
    return all(any(torch.equal(own, head) for head in columns.unbind(1)) for own in k.unbind(1))


def stack_queries(asked: list[Request]) -> tuple[Tensor, Tensor]:
    """Return the queries (b, h, q, n d) of calls on the same columns, one after another, and the keys (b, g, k, n d).

    The n different keys of the calls stand side by side, each with queries that are 0 for the others.
    """
    different: list[Tensor] = []
    places = []
    for one in asked:
        place = next((n for n, k in enumerate(different) if torch.equal(k, one.k)), len(different))
        different += [one.k] if place == len(different) else []
        places.append(place)
    d, n = asked[0].q.shape[3], len(different)
    rows = [F.pad(one.q, (place * d, (n - 1 - place) * d)) for one, place in zip(asked, places, strict=True)]
    groups = max(k.shape[1] for k in different)
    return torch.cat(rows, 2), torch.cat([k.repeat_interleave(groups // k.shape[1], 1) for k in different], 3)


def compute_shape(histories: list[KVHistory]) -> tuple[int, int, int, int]:
    """Return the axes (b, h, q, k) of the map of a layer, which is made only where calls are joined."""
    if len(histories) > 1:
        return join_maps(histories).shape
    b, h = histories[0].stored_calls[-1].q.shape[:2]
    q = sum(stored.q.shape[2] for stored in histories[0].stored_calls)
    k = histories[0].total - (histories[0].stored_calls[0].first if len(histories[0].stored_calls) == 1 else 0)
    return int(b), int(h), int(q), int(k)


def have_equal_weights(asked: list[Request]) -> bool:
    """Return whether calls with a rule of their own, so that they pack no sequences, have the same q, k, rule and scale."""
    first, *others = asked
    if first.mask == EVERYTHING or not isinstance(first.offset, int):
        return False
    return all(
        all(getattr(one, name) is None for name in ("bias", "sinks", "weight"))
        and (one.mask, one.scale, one.softcap) == (first.mask, first.scale, first.softcap)
        and isinstance(one.offset, int)
        and one.offset == first.offset
        and torch.equal(one.q, first.q)
        and torch.equal(one.k, first.k)
        for one in (*others, first)
    )


def build_many_calls_error(histories: list[KVHistory]) -> ConfigError:
    """Return the error for several calls of one visit that are no single map."""
    return ConfigError(
        f"{describe_module(histories[0].name)} calls attention {len(histories)} times in one forward: "
        "recording[name] has each of them."
    )
