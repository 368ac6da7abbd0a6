"""Selection of one head of a recording, without the others of its layer."""

from dataclasses import replace

from regard.observe import Recording
from regard.observe.kv_history import KVHistory, StoredCall


def select_head(recording: Recording, kind: str, part: str | None, layer: int, head: int) -> Recording:
    """Return a recording whose layer has only one of its heads, sharing memory; `head` counts the recorded heads.

    Joining many calls of a layer copies them; after this selection only one head is copied.
    """
    run = recording.last
    chosen = run.find_histories(layer, kind, part)
    strands = {key: select_history_head(strand, head) if strand in chosen else strand for key, strand in run.histories.items()}
    return replace(recording, runs=[replace(run, histories=strands)])


def select_history_head(strand: KVHistory, head: int) -> KVHistory:
    """Select one head of the calls of a `KVHistory`."""
    share = strand.stored_calls[0].q.shape[1] // strand.keys[0].shape[1]
    own, group = slice(head, head + 1), slice(head // share, head // share + 1)
    pieces = [select_call_head(piece, own, head) for piece in strand.stored_calls]
    return replace(
        strand, stored_calls=pieces, keys=[keys[:, group] for keys in strand.keys], selected_heads=(strand.heads[head],)
    )


def select_call_head(piece: StoredCall, own: slice, head: int) -> StoredCall:
    """Select one head of a call."""
    values = piece.values
    if values is not None:
        group = head * values.shape[1] // piece.q.shape[1]
        values = values[:, group : group + 1]
    bias = piece.bias
    return replace(
        piece,
        q=piece.q[:, own],
        values=values,
        mask=piece.mask.select_heads(own),
        bias=bias if bias is None or bias.shape[1] == 1 else bias[:, own],
        sinks=None if piece.sinks is None else piece.sinks[own],
    )
