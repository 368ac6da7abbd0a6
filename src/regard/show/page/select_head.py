"""Selection of one head of a recording, without the others of its layer, and of all keys but the first."""

from dataclasses import replace

from regard.mechanism import Prefix
from regard.observe import Recording
from regard.observe.kv_history import KVHistory, StoredCall


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


def hide_first_key(recording: Recording) -> Recording:
    """Return a recording whose first key is hidden, sharing memory: A_ij / (1 - A_i0), the softmax over the other keys.

    A query that sees no other key has weights 0.
    """
    run = recording.last
    histories = {
        key: replace(one, stored_calls=list(map(hide_call_first, one.stored_calls))) for key, one in run.histories.items()
    }
    return replace(recording, runs=[replace(run, histories=histories)])


def hide_call_first(stored: StoredCall) -> StoredCall:
    """Hide the first key of a call; one that has no first key, because a window left it behind, stays as it is."""
    return stored if stored.first else replace(stored, mask=stored.mask & ~Prefix(1))


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
