"""Histories that have different heads of the same layer, of ranks or of modules that read the same input, joined to one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map.compressed_bias import compress_bias
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Given
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall, stack_tables

UNLIKE = "the ranks recorded different calls: record the same forwards on each of them, without layers= and heads="


def join_head_histories(name: str, histories: Sequence[KVHistory]) -> KVHistory:
    """Return the history of a layer of this name with the heads of several modules, in their order."""
    keys = [torch.cat(parts, 1) for parts in zip(*(history.keys for history in histories), strict=True)]
    calls = [join_calls(parts) for parts in zip(*(history.stored_calls for history in histories), strict=True)]
    joined = replace(histories[0], name=name, keys=keys, stored_calls=calls, selected_heads=None, modules=tuple(histories))
    return replace(joined, block=None)  # the output of a head is no stream


def can_join_heads(histories: Sequence[KVHistory]) -> bool:
    """Return whether the calls of some modules differ in nothing but their heads, their rules and their biases."""
    return len({describe_axes(history) for history in histories}) == 1 and all(
        history.selected_heads is None and stored.weight is None and isinstance(stored.offset, int)
        for history in histories
        for stored in history.stored_calls
    )


def describe_axes(history: KVHistory) -> tuple[Any, ...]:
    """Return what the histories of the heads of one layer have in common."""
    steps = zip(history.steps, history.keys, strict=True)
    parts: list[Any] = [history.past, *((step, keys.shape[2:], count_shares(history, keys)) for step, keys in steps)]
    for stored in history.stored_calls:
        parts += stored.q.shape[0], stored.q.shape[2:], stored.q.dtype, stored.first, stored.stop, stored.step, stored.scale
        parts += stored.softcap, str(stored.offset), stored.sinks is None, stored.bias is None
        parts += (stored.v is None or stored.v.shape[2:],)
    return tuple(parts)


def count_shares(history: KVHistory, keys: Tensor) -> float:
    """Return how many heads share keys."""
    return history.stored_calls[0].q.shape[1] / keys.shape[1]


def join_calls(calls: Sequence[StoredCall]) -> StoredCall:
    """Return one call with the heads of several."""
    first = calls[0]
    same = {(call.scale, call.softcap, call.first, call.stop, call.weight is None) for call in calls}
    if len(same) > 1:
        raise ConfigError(UNLIKE)
    parts: dict[str, Any] = {name: join_tensors([getattr(call, name) for call in calls]) for name in ("q", "v", "sinks")}
    return replace(first, **parts, bias=join_biases(calls), mask=join_masks(calls), residual=None, graph=None)


def join_tensors(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return tensors joined along their heads, the last axis of a vector and the second of four; None if one is missing."""
    tensors = [x for x in parts if x is not None]
    return torch.cat(tensors, 0 if tensors[0].dim() == 1 else 1) if len(tensors) == len(parts) else None


def join_biases(calls: Sequence[StoredCall]) -> Tensor | None:
    """Return the biases of all heads; one that all heads share once."""
    biases = [call.bias for call in calls if call.bias is not None]
    if len(biases) < len(calls):
        return None
    if biases[0].shape[1] == 1 and all(torch.equal(biases[0], bias) for bias in biases):
        return biases[0]
    own = [bias.expand(*bias.shape[:1], call.q.shape[1], *bias.shape[2:]) for bias, call in zip(biases, calls, strict=True)]
    return compress_bias(torch.cat(own, 1))


def join_masks(calls: Sequence[StoredCall]) -> Mask:
    """Return the rule of all heads: their common one, or a table that states each."""
    if all(call.mask == calls[0].mask for call in calls):
        return calls[0].mask
    tables = []
    for call in calls:
        queries, keys = (torch.arange(n, device=call.q.device) for n in (call.q.shape[2], call.stop - call.first))
        visible_keys = call.mask.block(queries, keys, call.offset)
        tables.append(visible_keys.expand(-1, call.q.shape[1], -1, -1).transpose(1, 2))
    return Given(stack_tables(tables).transpose(1, 2))
