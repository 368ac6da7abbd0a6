"""Selection of one head of a recording, without the others of its layer, and of all keys but the first token."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.map.hiding_bias import replace_hiding_numbers
from regard.mechanism import Given, Prefix
from regard.observe import Recording
from regard.observe.map_view import MapView
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall


def select_head(recording: Recording, kind: str, part: str | None, layer: int, head: int) -> Recording:
    """Return a recording whose layer has only one of its heads, sharing memory; `head` counts the recorded heads.

    Joining many calls of a layer copies them; after this selection only one head is copied.
    """
    run = recording.last.merge_modules()
    chosen = run.find_histories(layer, kind, part)
    histories = {
        key: select_history_head(history, head) if history in chosen else history for key, history in run.histories.items()
    }
    return replace(recording, runs=[replace(run, histories=histories)], last_number=-1)


def hide_first_token(recording: Recording) -> Recording:
    """Return a recording whose first token f is hidden, sharing memory: A_ij / (1 - A_if), the softmax over the other keys.

    Padding on the left comes before the first token of its text. A query that sees no other key has weights 0.
    """
    run = recording.last.merge_modules()
    histories = {key: hide_history_first(history) for key, history in run.histories.items()}
    return replace(recording, runs=[replace(run, histories=histories)], last_number=-1)


def hide_history_first(history: KVHistory) -> KVHistory:
    """Hide the first token of each batch row in the calls of a `KVHistory`."""
    stored_calls = list(map(partial(hide_call_key, history), history.stored_calls, find_first_tokens(history)))
    return replace(history, stored_calls=stored_calls)


def find_first_tokens(history: KVHistory) -> list[Tensor]:
    """Return the first token of each batch row in each call, (b,), by its index in the history; -1 before it is read."""
    step = history.stored_calls[0].step
    first, found = torch.full((len(history.stored_calls[0].q),), -1), []
    for stored in history.stored_calls:
        first, step = history.reorder_rows(first, step, stored.step), stored.step
        if bool((first < 0).any()):  # so far the row is padding
            first = torch.where(first < 0, find_call_first(history, stored), first)
        found.append(first)
    return found


def find_call_first(history: KVHistory, stored: StoredCall) -> Tensor:
    """Return the first token of each batch row of a call, (b,), by its index in the history; -1 where the row has none."""
    if stored.bias is None and not stored.mask.is_batch_specific and not stored.first:  # no key is padding
        return torch.zeros(len(stored.q), dtype=torch.long)
    look = MapView(history.build_call_map(stored), own=history.kind == "self")
    keys = torch.tensor(look.find_first_tokens(look.is_token), device=look.map.device)
    is_seen = look.is_visible(keys.unsqueeze(-1).expand(-1, look.map.shape[2])).any(2).any(1)
    return torch.where(is_seen, keys + stored.first, -1).cpu()


def hide_call_key(history: KVHistory, stored: StoredCall, key: Tensor) -> StoredCall:
    """Hide a key of each batch row (b,) of a call, by its index in the history; one before the call's first key is not there.

    A number in the bias that hides a key becomes -inf: without its only key a query has weights 0, not those of hidden keys.
    """
    if bool((key < stored.first).all()):
        return stored
    others = torch.arange(stored.first, stored.stop) != key.view(-1, 1, 1, 1)
    rest = Given.from_shared_table(others.to(stored.q.device)) if key.any() else ~Prefix(1)
    request = history.build_call_map(stored).planes.request if stored.bias is not None else None
    bias = None if request is None else replace_hiding_numbers(request).bias
    return replace(stored, mask=stored.mask & rest, bias=bias)


def select_history_head(history: KVHistory, head: int) -> KVHistory:
    """Select one head of the calls of a `KVHistory`."""
    share = history.stored_calls[0].q.shape[1] // history.keys[0].shape[1]
    own, group = slice(head, head + 1), slice(head // share, head // share + 1)
    stored_calls = [select_call_head(stored, own, head) for stored in history.stored_calls]
    return replace(
        history,
        stored_calls=stored_calls,
        keys=[keys[:, group] for keys in history.keys],
        selected_heads=(history.heads[head],),
    )


def select_call_head(stored: StoredCall, own: slice, head: int) -> StoredCall:
    """Select one head of a call."""
    v = stored.v
    if v is not None:
        group = head * v.shape[1] // stored.q.shape[1]
        v = v[:, group : group + 1]
    bias = stored.bias
    return replace(
        stored,
        q=stored.q[:, own],
        v=v,
        mask=stored.mask.select_heads(own),
        bias=bias if bias is None or bias.shape[1] == 1 else bias[:, own],
        sinks=None if stored.sinks is None else stored.sinks[own],
    )
