"""Serialization of a recording to a plain header and named tensors."""

from typing import Any

from torch import Tensor

from regard.map.computed_bias import drop_repeated_axes
from regard.map.distance_products import DistanceProducts
from regard.map.grid_bias import GridBias
from regard.map.grouped_bias import GroupedBias
from regard.map.relative_bias import RelativeBias
from regard.observe.files import implicit_serialization
from regard.observe.files.mask_serialization import serialize_mask
from regard.observe.implicit_history import ImplicitCall, ImplicitHistory
from regard.observe.recorded_runs.run import Run
from regard.observe.recorded_runs.token_ids import list_ids
from regard.observe.recorded_runs.words import TextPair
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall
from regard.observe.token_places.places import serialize_places

CALL_NUMBERS = ("first", "stop", "step")
CALL_TENSORS = {  # name in a file: field
    "q": "q",
    "values": "v",
    "bias": "bias",
    "sinks": "sinks",
    "weight": "weight",
    "residual": "residual",
}


class NamedTensors:
    """Tensors by name, each memory stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[tuple[Any, ...], str] = {}
        self.addresses: set[int] = set()

    def add(self, x: Tensor | None) -> Any:
        """Return the name of a tensor in the file, adding it if needed; None for None.

        A relative bias is the name of its diagonals, and its queries; one of products with distances is the names of its terms,
        one of groups of keys those of its numbers and groups, and one of a grid that of its numbers, and the grid.
        """
        if x is None:
            return None
        if isinstance(x, RelativeBias):
            return [self.add(x.numbers), x.shape[-2]]
        if isinstance(x, DistanceProducts):
            terms = [[*map(self.add, one.list_tensors()), one.is_of_keys] for one in x.terms]
            return {
                "shape": list(x.shape),
                "terms": terms,
                "rest": None if x.rest is None else self.add(drop_repeated_axes(x.rest)),
            }
        if isinstance(x, GroupedBias):
            return {"shape": list(x.shape), "numbers": self.add(drop_repeated_axes(x.numbers)), "groups": self.add(x.groups)}
        if isinstance(x, GridBias):
            spans = [x.queries.start, x.keys.start]
            grid = [x.grid.first, x.grid.rows, x.grid.columns, x.grid.step]
            return {"shape": list(x.shape), "numbers": self.add(drop_repeated_axes(x.numbers)), "grid": grid, "starts": spans}
        key = x.data_ptr(), x.shape, x.stride(), x.dtype
        if key not in self.names or not x.numel():
            self.names[key] = f"t{len(self.tensors)}"
            saved = x.contiguous()
            is_shared = saved.data_ptr() in self.addresses  # a part of another, as of a call that was cut
            self.tensors[self.names[key]] = saved.clone() if is_shared else saved
            self.addresses.add(saved.data_ptr())
        return self.names[key]


def serialize_recording(recording: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a Recording."""
    packed = NamedTensors()
    other = [[one.kernel, one.module, packed.add(one.weights)] for one in recording.other_weights]
    header = {
        "model": recording.model,
        "tokens": serialize_tokens(recording.tokens),
        "missed": [[one.kernel, one.module, one.reason] for one in recording.missed],
        "notes": recording.notes,
        **({"other_weights": other} if other else {}),
        **({} if recording.places is None else {"places": serialize_places(recording.places)}),
        "runs": [
            serialize_run(run, packed) | ({} if run.tokens is None else {"tokens": serialize_tokens(run.tokens)})
            for run in recording.runs
        ],
        **({} if recording.last_number < 0 else {"last": recording.last_number}),
    }
    return header, packed.tensors


def serialize_tokens(tokens: Any) -> Any:
    """Return the words of one batch row or of each, or those of both axes, as plain lists."""
    if isinstance(tokens, TextPair):
        texts = {"rows": tokens.rows, "columns": tokens.columns} | ({} if tokens.read is tokens.rows else {"read": tokens.read})
        return {name: serialize_tokens(text) for name, text in texts.items()}
    return None if tokens is None else [one if isinstance(one, str) else list(one) for one in tokens]


def serialize_run(run: Run, packed: NamedTensors) -> dict[str, Any]:
    """Return a Run as plain values: its histories, and its calls by the indices of history and stored call.

    Histories of recurrences are counted after the others.
    """
    softmax = list(dict.fromkeys([*run.histories.values(), *(call.history for call in run.softmax_calls)]))
    others = (call.history for call in run.calls if isinstance(call, ImplicitCall))
    implicit = list(dict.fromkeys([*run.implicit_histories.values(), *others]))
    for history in softmax:
        history.check_unchanged()
    histories: list[KVHistory | ImplicitHistory] = [*softmax, *implicit]
    keys = {id(history): list(key) for key, history in (*run.histories.items(), *run.implicit_histories.items())}
    ids = {path: packed.add(x) for path, x in list_ids(run.read_ids, run.parent_rows).items()}
    places = {id(stored): n for history in histories for n, stored in enumerate(history.stored_calls)}
    return {
        "turns": {str(step): packed.add(rows) for step, rows in run.parent_rows.items()},
        "rows": run.rows,
        **({"ids": ids} if ids else {}),
        "strands": [
            {
                "key": keys.get(id(history)),
                "name": history.name,
                "kind": history.kind,
                "past": history.past,
                "heads": history.selected_heads,
                "block": history.block,
                "links": None if history.links is None else [*history.links[:2], sorted(history.links.beside)],
                "keys": [[packed.add(x), step] for x, step in zip(history.keys, history.steps, strict=True)],
                "pieces": [serialize_call(stored, packed) for stored in history.stored_calls],
            }
            for history in softmax
        ],
        "implicit": [implicit_serialization.serialize_history(one, keys.get(id(one)), packed) for one in implicit],
        "calls": [[histories.index(call.history), places[id(call.stored)]] for call in run.calls],
    }


def serialize_call(stored: StoredCall, packed: NamedTensors) -> dict[str, Any]:
    """Return a stored call as plain values: its tensors by name, its mask as a list."""
    q, stop = stored.q.shape[2], stored.stop - stored.first
    return {
        **{name: packed.add(getattr(stored, field)) for name, field in CALL_TENSORS.items()},
        **{name: getattr(stored, name) for name in (*CALL_NUMBERS, "scale", "softcap")},
        "part": [*stored.part[:2], None if stored.part.row_range is None else [*stored.part.row_range]],
        "offset": stored.offset.tolist() if isinstance(stored.offset, Tensor) else stored.offset,
        "mask": serialize_mask(stored.mask, q, stop, stored.offset, packed),
    }
