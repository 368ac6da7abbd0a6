"""Positions of a call's queries and keys in the sequence, whatever a cache holds, and of the tokens that a change names."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map.indexing import check_index, check_slice
from regard.mechanism.arguments import describe_value
from regard.observe.interception.attention_call import AttentionCall
from regard.observe.interception.provenance import ModuleFrame
from regard.observe.interception.thread_state import STATE
from regard.observe.recorded_runs.open_runs import find_cache, read_cache_length
from regard.observe.stored_calls.mask_inference import find_visible_end

Places = slice | int | Sequence[int] | Tensor | None


class TokenPositions(NamedTuple):
    """Positions in the sequence: of a call's first query and of its first key, and the number of keys so far."""

    past: int
    first: int
    total: int


def locate_tokens(call: AttentionCall, kind: str) -> TokenPositions:
    """Return where the queries and keys of a call stand in the sequence.

    Where more keys than queries are none of a cache, as memory that a layer has learned, both stand as in the call. A cache of
    a sliding window holds its last keys only: how many tokens it has had is asked of the cache object, if the
    calling modules were given one of transformers; without one the first key is taken for the first token.
    """
    q, k = call.q.shape[2], call.k.shape[2]
    if kind == "cross" or not call.can_use_cache or not may_continue_cache(call):
        return TokenPositions(call.past, 0, k)
    end = find_visible_end(call.mask, q, k, call.offset) if k > q else k
    total = max(count_cached_tokens(STATE.frames) or 0, end)
    return TokenPositions(max(total - q, 0), total - end, total)


def may_continue_cache(call: AttentionCall) -> bool:
    """Return whether the first of more keys than queries may be those of a cache.

    Several queries with a cache have a rule, a bias or an offset that states their places, unless a cache is known. A single
    query is one of all tokens that its module was given, as a class token, or else the next token.
    """
    (b, _, q, _), k = call.q.shape, call.k.shape[2]
    has_rule = call.mask.is_query_dependent or (call.bias is not None and call.bias.shape[2] > 1)
    if k <= q or has_rule or isinstance(call.offset, Tensor) or call.offset:
        return True
    if count_cached_tokens(STATE.frames) is not None:
        return True
    if q > 1:
        return call.has_stored_weights  # of which no rule is known
    given = STATE.frames[-1].input_tensors[:1] if STATE.frames else []  # further ones may be slots of a cache
    return call.follows_cache() or not any(x.dim() == 3 and x.shape[:2] == (b, k) for x in given)


def count_cached_tokens(frames: Sequence[ModuleFrame]) -> int | None:
    """Return how many tokens the cache of the running attention module has had; None if it has none that can say."""
    for frame in reversed(frames):
        layer, cache = getattr(frame.module, "layer_idx", None), find_cache(frame.args, frame.kwargs)
        if type(layer) is int and cache is not None:
            return read_cache_length(cache, layer)
    return None


def mark_positions(places: Places, size: int, name: str) -> Tensor:
    """Return positions as a bool (size,); positions past the end are ignored: their tokens are yet to come.

    Negative ones count from the end, as those of a slice do, in each step of a generation from the last token so far.
    """
    found = torch.zeros(size, dtype=torch.bool)
    if places is None or isinstance(places, slice):
        if places is not None:
            check_slice(name, places)
        found[slice(None) if places is None else places] = True
    elif isinstance(places, Tensor) and places.dtype == torch.bool:
        found[: len(places)] = places[:size].cpu()
    else:
        check_index(name, places)
        chosen = torch.as_tensor(places).cpu().long()  # of an empty list they are floats
        if chosen.dim() > 1:
            raise ConfigError(
                f"{name} must be positions along one axis, e.g. queries=5, keys=[2, 3]; got {describe_value(places)}."
            )
        chosen = chosen.reshape(-1)
        chosen = torch.where(chosen < 0, chosen + size, chosen)
        found[chosen[(chosen < size) & (chosen >= 0)]] = True
    return found
