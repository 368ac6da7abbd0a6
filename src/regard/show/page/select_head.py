"""Selection of one head of a recording, without the others of its layer, and of all keys but the first token."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from regard.map.hiding_bias import replace_hiding_numbers
from regard.mechanism import Given, Prefix
from regard.observe import Recording
from regard.observe.kv_history import KVHistory, StoredCall
from regard.observe.map_view import MapView


def select_head(recording: Recording, kind: str, part: str | None, layer: int, head: int) -> Recording:
    """Return a recording whose layer has only one of its heads, sharing memory; `head` counts the recorded heads.

    Joining many calls of a layer copies them; after this selection only one head is copied.
    """
    run = recording.last
    chosen = run.find_histories(layer, kind, part)
    histories = {
        key: select_history_head(history, head) if history in chosen else history for key, history in run.histories.items()
    }
    return replace(recording, runs=[replace(run, histories=histories)])


def hide_first_token(recording: Recording) -> Recording:
    """Return a recording whose first token f is hidden, sharing memory: A_ij / (1 - A_if), the softmax over the other keys.

    Padding on the left comes before the first token of its text. A query that sees no other key has weights 0.
    """
    run = recording.last
    histories = {key: hide_history_first(history) for key, history in run.histories.items()}
    return replace(recording, runs=[replace(run, histories=histories)])


def hide_history_first(history: KVHistory) -> KVHistory:
    """Hide the first token of each batch row in the calls of a `KVHistory`."""
    first, step = find_first_tokens(history), history.stored_calls[0].step
    hide = partial(hide_call_key, history)
    stored_calls = [hide(stored, history.reorder_rows(first, step, stored.step)) for stored in history.stored_calls]
    return replace(history, stored_calls=stored_calls)


def find_first_tokens(history: KVHistory) -> Tensor:
    """Return the first token of each batch row of the first call, (b,), by its index among the keys."""
    stored = history.stored_calls[0]
    if stored.bias is None and not stored.mask.is_batch_specific:  # no key is padding
        return torch.zeros(len(stored.q), dtype=torch.long)
    look = MapView(history.build_call_map(stored), own=history.kind == "self")
    return torch.tensor(look.find_first_tokens(look.is_token))


def hide_call_key(history: KVHistory, stored: StoredCall, key: Tensor) -> StoredCall:
    """Hide a key of each batch row (b,) of a call; one that a window left behind is no key of the call.

    A number in the bias that hides a key becomes -inf: without its only key a query has weights 0, not those of hidden keys.
    """
    if stored.first:
        return stored
    others = torch.arange(stored.stop) != key.view(-1, 1, 1, 1)
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
