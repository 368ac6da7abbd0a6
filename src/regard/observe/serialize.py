"""Serialization of a recording to a plain header and named tensors."""

from typing import Any

from torch import Tensor

from regard.errors import ConfigError
from regard.mechanism.mask_algebra import And, Everything, Mask, Not, Or
from regard.mechanism.masks import Causal, Documents, Given, Padding, Prefix, Window
from regard.observe.kv_history import StoredCall
from regard.observe.words import TextPair

LARGEST = 2**30  # entries of the table of a user-defined rule
PIECE_NUMBERS = ("first", "stop", "step")
PIECE_TENSORS = ("q", "values", "bias", "sinks", "weight")


class NamedTensors:
    """Tensors by name, each memory stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[tuple[Any, ...], str] = {}

    def add(self, x: Tensor | None) -> str | None:
        """Return the name of a tensor in the file, adding it if needed; None for None."""
        if x is None:
            return None
        key = x.data_ptr(), x.shape, x.stride(), x.dtype
        if key not in self.names or not x.numel():
            self.names[key] = f"t{len(self.tensors)}"
            self.tensors[self.names[key]] = x.contiguous()
        return self.names[key]


def serialize_recording(recording: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a Recording."""
    packed = NamedTensors()
    header = {
        "model": recording.model,
        "tokens": serialize_tokens(recording.tokens),
        "missed": [[one.kernel, one.module, one.reason] for one in recording.missed],
        "runs": [serialize_run(run, packed) for run in recording.runs],
    }
    return header, packed.tensors


def serialize_tokens(tokens: Any) -> Any:
    """Return the words of one batch row or of each, or those of both axes, as plain lists."""
    if isinstance(tokens, TextPair):
        texts = {"rows": tokens.rows, "columns": tokens.columns} | ({} if tokens.read is tokens.rows else {"read": tokens.read})
        return {name: serialize_tokens(text) for name, text in texts.items()}
    return None if tokens is None else [one if isinstance(one, str) else list(one) for one in tokens]


def serialize_run(run: Any, packed: NamedTensors) -> dict[str, Any]:
    """Return a Run as plain values: its histories, and its calls by the indices of history and stored call."""
    strands = list(dict.fromkeys([*run.histories.values(), *(call.history for call in run.calls)]))
    keys = {id(strand): list(key) for key, strand in run.histories.items()}
    places = {id(piece): n for strand in strands for n, piece in enumerate(strand.stored_calls)}
    return {
        "turns": {str(step): packed.add(rows) for step, rows in run.parent_rows.items()},
        "rows": run.rows,
        "strands": [
            {
                "key": keys.get(id(strand)),
                "name": strand.name,
                "kind": strand.kind,
                "past": strand.past,
                "heads": strand.selected_heads,
                "keys": [[packed.add(x), step] for x, step in zip(strand.keys, strand.steps, strict=True)],
                "pieces": [serialize_call(piece, packed) for piece in strand.stored_calls],
            }
            for strand in strands
        ],
        "calls": [[strands.index(call.history), places[id(call.stored)]] for call in run.calls],
    }


def serialize_call(piece: StoredCall, packed: NamedTensors) -> dict[str, Any]:
    """Return a stored call as plain values: its tensors by name, its rule as a list."""
    q, stop = piece.q.shape[2], piece.stop - piece.first
    return {
        **{name: packed.add(getattr(piece, name)) for name in PIECE_TENSORS},
        **{name: getattr(piece, name) for name in (*PIECE_NUMBERS, "scale", "softcap")},
        "offset": piece.offset.tolist() if isinstance(piece.offset, Tensor) else piece.offset,
        "mask": serialize_rule(piece.mask, q, stop, piece.offset, packed),
    }


def serialize_rule(mask: Mask, q: int, k: int, offset: Any, packed: NamedTensors) -> list[Any]:
    """Return a rule as a list: its name, then its parts; a user-defined rule becomes a table.

    Raises ConfigError if that table would have more than LARGEST entries.
    """
    if isinstance(mask, Everything | Causal):
        return [type(mask).__name__]
    if isinstance(mask, Window):
        return ["Window", mask.left, mask.right]
    if isinstance(mask, Prefix):
        return ["Prefix", mask.n]
    if isinstance(mask, Padding):
        return ["Padding", list(mask.lengths)]
    if isinstance(mask, Documents):
        return ["Documents", packed.add(mask.queries), None if mask.has_shared_ids else packed.add(mask.keys)]
    if isinstance(mask, Given):
        return ["Given", packed.add(mask.given)]
    if isinstance(mask, And | Or):
        return [type(mask).__name__, *(serialize_rule(one, q, k, offset, packed) for one in (mask.one, mask.other))]
    if isinstance(mask, Not):
        return ["Not", serialize_rule(mask.mask, q, k, offset, packed)]
    if q * k * mask.batch * mask.heads > LARGEST:
        raise ConfigError(
            f"{type(mask).__name__} is a rule that a file has no word for, and its table of {q:,} x {k:,} is too large."
        )
    return ["Given", packed.add(Given(mask.table(q, k, offset)).given)]
