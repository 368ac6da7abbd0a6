"""Recorded attention without a softmax in a file: plain values and named tensors, and the checks of what is read."""

from typing import Any

from torch import Tensor

from regard.map.computed_bias import ComputedBias
from regard.map.convolution import Convolution
from regard.map.implicit_map import MECHANISMS, Mechanism
from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import ScoredMatrix
from regard.map.stored_matrix import StoredMatrix
from regard.observe.files.header_values import (
    REAL,
    require_bias,
    require_count,
    require_finite,
    require_four_axes,
    require_list,
    require_offset,
    require_rows,
    require_text,
)
from regard.observe.files.mask_serialization import MaskReader, serialize_mask
from regard.observe.implicit_history import ImplicitHistory, StoredRecurrence

CALL_TENSORS = ("values", "queries", "outputs", "gates", "state")


def serialize_history(history: ImplicitHistory, key: list[Any] | None, packed: Any) -> dict[str, Any]:
    """Return a history as plain values; packed, a NamedTensors, holds its tensors. key is its key in its run, if it has one."""
    return {
        "key": key,
        "name": history.name,
        "turns": {str(step): packed.add(rows) for step, rows in history.parent_rows.items()},
        "pieces": [
            {
                "step": stored.step,
                "mechanism": serialize_mechanism(stored.mechanism, packed),
                **{name: packed.add(getattr(stored, name)) for name in CALL_TENSORS},
            }
            for stored in history.stored_calls
        ],
    }


def serialize_mechanism(mechanism: Mechanism, packed: Any) -> dict[str, Any]:
    """Return a mechanism as plain values: its kind, its tensors by name with their shapes, and its numbers.

    Tensors are flat in the file, so that the same numbers with other axes are there once.
    """
    given = mechanism.tensors.items()
    tensors = {name: [packed.add(x if isinstance(x, ComputedBias) else x.reshape(-1)), list(x.shape)] for name, x in given}
    if isinstance(mechanism, Convolution):
        return {"kind": "convolution", "tensors": tensors, "batch": mechanism.batch, "length": mechanism.length}
    if isinstance(mechanism, StoredMatrix):
        return {"kind": "stored matrix", "tensors": tensors, "title": mechanism.title}
    if isinstance(mechanism, ScoredMatrix):
        offset = mechanism.offset
        return {
            "kind": "scored matrix",
            "tensors": tensors,
            **{name: getattr(mechanism, name) for name in ("title", "activation", "scale", "softcap", "shift")},
            "offset": offset.tolist() if isinstance(offset, Tensor) else offset,
            "mask": serialize_mask(mechanism.mask, mechanism.rows, mechanism.shape[2], offset, packed),
        }
    return {"kind": "linear recurrence", "tensors": tensors, "is_strict": mechanism.is_strict}


def deserialize_history(found: dict[str, Any], tensors: dict[str, Tensor], masks: MaskReader) -> ImplicitHistory:
    """Build a history from its part of the header, and check that its calls form a map.

    Raises ValueError, TypeError or LookupError, or an error of the map, if they do not.
    """
    turns = {require_count(int(step)): require_rows(tensors[name]) for step, name in found["turns"].items()}
    history = ImplicitHistory(require_text(found["name"]), turns)
    history.stored_calls.extend(deserialize_call(one, tensors, masks) for one in require_list(found["pieces"]))
    if not history.stored_calls:
        raise ValueError(f"{history.name} has no calls")
    former = None
    for stored in history.stored_calls:
        rows = turns.get(stored.step)
        if former is not None and (stored.step <= former.step or (rows is None and len(stored.values) != len(former.values))):
            raise ValueError(f"{history.name}: step {stored.step} does not continue step {former.step}")
        if rows is not None and (len(rows) != len(stored.values) or (former and int(rows.max()) >= len(former.values))):
            raise ValueError(f"{history.name}: step {stored.step} continues batch rows that do not exist")
        former = stored
    history.build_map()
    return history


def deserialize_call(found: dict[str, Any], tensors: dict[str, Tensor], masks: MaskReader) -> StoredRecurrence:
    """Build a stored call from its part of the header."""
    named = {name: None if found[name] is None else tensors[found[name]] for name in CALL_TENSORS}
    values, queries, outputs = (named[name] for name in CALL_TENSORS[:3])
    if values is None or queries is None or outputs is None:
        raise ValueError("a recurrence needs values, and outputs of some queries")
    mechanism = deserialize_mechanism(found["mechanism"], tensors, masks)
    (b, h, t), rows = mechanism.shape, mechanism.rows
    if require_four_axes(values).shape[:2] != (b, h) or values.shape[2] not in (t, rows):
        raise ValueError(f"values {tuple(values.shape)} do not fit a recurrence of (b, h, t) = {(b, h, t)}")
    if require_rows(queries).numel() and int(queries.max()) >= rows:
        raise ValueError(f"outputs of a query {int(queries.max())} of {rows}")
    for name in ("outputs", "gates"):
        x = named[name]
        if x is not None and (x.shape != (b, h, len(queries), values.shape[3]) or x.dtype not in REAL):
            raise ValueError(f"{name} {tuple(x.shape)} do not fit values {tuple(values.shape)}")
    return StoredRecurrence(mechanism, values, queries, outputs, named["gates"], named["state"], require_count(found["step"]))


def deserialize_mechanism(found: dict[str, Any], tensors: dict[str, Tensor], masks: MaskReader) -> Mechanism:
    """Build a mechanism from its part of the header."""
    kind, named = MECHANISMS[found["kind"]], {}
    for name, flat in found["tensors"].items():
        x, shape = require_list(flat, 2)
        sizes = [require_count(size) for size in require_list(shape)]
        named[name] = require_bias(x, tensors) if isinstance(x, list | dict) else tensors[x].view(sizes)
    if kind is Convolution:
        kernel = named["kernel"]
        if kernel.dtype not in REAL or kernel.numel() == 0:
            raise ValueError("the kernel of a convolution must be floating-point numbers")
        return Convolution(**named, batch=require_count(found["batch"]), length=require_count(found["length"]))
    if kind is StoredMatrix:
        return StoredMatrix(**named, title=require_text(found["title"]))
    if kind is ScoredMatrix:
        return ScoredMatrix(
            **named,
            title=require_text(found["title"]),
            activation=require_text(found["activation"]),
            scale=require_finite(found["scale"]),
            softcap=None if found["softcap"] is None else require_finite(found["softcap"]),
            shift=require_finite(found["shift"]),
            offset=require_offset(found["offset"]),
            mask=masks.deserialize_mask(found["mask"]),
        )
    if not isinstance(found["is_strict"], bool):
        raise TypeError("is_strict must be true or false")
    return LinearRecurrence(**named, is_strict=found["is_strict"])
