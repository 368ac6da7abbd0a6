"""The histories of the calls of one layer joined to one map, side by side or one after the other."""

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map import AttentionMap, DifferentiableMap
from regard.mechanism.mask_algebra import EVERYTHING
from regard.mechanism.masks import Causal, Documents
from regard.mechanism.request import Request
from regard.observe.recorded_runs.part_names import describe_module
from regard.observe.stored_calls.kv_history import KVHistory


def join_differentiable_maps(histories: list[KVHistory]) -> DifferentiableMap:
    """Return the map of one visit with its graph. Raises ConfigError if it makes several calls of attention."""
    if len(histories) > 1:
        raise ConfigError(
            f"{describe_module(histories[0].name)} calls attention {len(histories)} times in one forward, "
            "so its joined map has no graph."
        )
    return histories[0].build_differentiable_map()


def join_maps(histories: list[KVHistory]) -> AttentionMap:
    """Return the map of one visit; several calls that pack sequences become one block-diagonal map.

    Calls of single queries or of parts of them, one after another on the same keys or on growing prefixes, become its rows.
    Calls with the same weights, each on a part of the values as in DiffLlama, have one map.
    Raises ConfigError if the calls have a rule of their own, or different shapes and scales.
    """
    maps = [history.build_map() for history in histories]
    if len(maps) == 1:
        return maps[0]
    asked = [one.planes.request for one in maps]
    alike = {(one.q.shape[:2], one.q.shape[3], one.k.shape[1], one.scale, one.softcap) for one in asked}
    plain = all(one.mask == EVERYTHING and one.offset == 0 for one in asked)
    plain = plain and all(x is None for one in asked for x in (one.bias, one.sinks, one.weight))
    if have_equal_weights(asked):
        return maps[0]
    if len(alike) > 1 or not plain:
        raise build_many_calls_error(histories)
    growth = find_key_growth([one.k for one in asked], [one.q.shape[2] for one in asked])
    if growth is not None:
        rule, offset = (Causal(), asked[0].k.shape[2] - 1) if growth else (EVERYTHING, 0)
        rows = torch.cat([one.q for one in asked], 2)
        return AttentionMap(rows, asked[-1].k, rule, offset=offset, scale=asked[0].scale, softcap=asked[0].softcap)
    require_packed(histories)
    lengths = torch.tensor([one.shape[2:] for one in maps]).T  # of queries, of keys
    ids = [torch.repeat_interleave(torch.arange(len(maps)), each) for each in lengths]
    q, k = torch.cat([one.q for one in asked], 2), torch.cat([one.k for one in asked], 2)
    return AttentionMap(q, k, Documents(*ids), scale=asked[0].scale, softcap=asked[0].softcap)


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


def require_packed(histories: list[KVHistory]) -> None:
    """Raise ConfigError if several calls of one visit may not be packed sequences, but a loop over heads for example."""
    if not all(stored.can_be_packed for history in histories for stored in history.stored_calls):
        raise build_many_calls_error(histories)


def build_many_calls_error(histories: list[KVHistory]) -> ConfigError:
    """Return the error for several calls of one visit that are no single map."""
    return ConfigError(
        f"{describe_module(histories[0].name)} calls attention {len(histories)} times in one forward: "
        "recording[name] has each of them."
    )


def find_key_growth(keys: list[Tensor], queries: list[int]) -> int | None:
    """Return how many keys each call adds to those of the call before: 0 or 1; None if its keys are others.

    Calls that add none have fewer queries than keys, calls that add one have one query each.
    """
    lengths = [k.shape[2] for k in keys]
    growth = lengths[-1] - lengths[-2] if len(keys) > 1 else None
    grows = growth == 1 and all(n == 1 for n in queries) and lengths == [lengths[0] + n for n in range(len(keys))]
    stays = growth == 0 and len(set(lengths)) == 1 and all(n < lengths[0] for n in queries)
    same = (grows or stays) and all(torch.equal(k, keys[-1][:, :, : k.shape[2]]) for k in keys)
    return growth if same else None
