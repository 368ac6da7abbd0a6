"""Deserialization of a recording from its header and named tensors; everything from a file is checked before it is used.

The time is linear in the size of the file, independent of what the header states: what many calls share is checked once.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.mechanism.arguments import check_instance, check_path
from regard.observe.files import implicit_serialization, safetensors_file
from regard.observe.files.consistency import ParentRowsChecker, check_call, check_keys
from regard.observe.files.header_values import (
    REAL,
    require_bias,
    require_bool,
    require_count,
    require_finite,
    require_four_axes,
    require_ids,
    require_integer,
    require_list,
    require_offset,
    require_rows,
    require_text,
)
from regard.observe.files.mask_serialization import MaskReader
from regard.observe.files.serialize import CALL_NUMBERS, CALL_TENSORS
from regard.observe.implicit_history import ImplicitCall, ImplicitHistory
from regard.observe.interception.attention_call import CallPart, MissedCall, OtherWeights
from regard.observe.recorded_runs.data_flow import LayerLinks
from regard.observe.recorded_runs.run import KINDS, Call, Run
from regard.observe.recorded_runs.words import TextPair
from regard.observe.recording import Recording
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall
from regard.observe.token_places.places import deserialize_places

WRONG = (RegardError, ValueError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError, OverflowError)


def load(path: str | Path, *, verify: bool = True) -> Recording:
    """Return the recording in a file that recording.save wrote; the tensors of one above 256 MiB are memory-mapped.

    `verify` reads the whole file once and compares every tensor with its checksum; otherwise mapped tensors are read when
    needed and only the header is compared. Files before version 3 have no checksums.
    Raises DataError, stating what was expected, if the file is missing, truncated, damaged, foreign or newer.
    """
    header, tensors = safetensors_file.read_file(Path(check_path("path", path)), check_instance("verify", verify, bool))
    try:
        return deserialize_recording(header, tensors)
    except WRONG as error:
        raise safetensors_file.build_damage_error(path, error) from None


def deserialize_recording(header: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    """Build the recording of a header and its tensors. Raises ValueError, TypeError or LookupError if they are inconsistent."""
    missed = [MissedCall(*(require_text(part) for part in require_list(one, 3))) for one in require_list(header["missed"])]
    runs = [deserialize_run(run, tensors) for run in require_list(header["runs"])]
    notes = [require_text(one) for one in require_list(header.get("notes", []))]  # absent in older files
    other_weights = [  # absent in older files
        OtherWeights(require_text(kernel), require_text(module), tensors[name])
        for kernel, module, name in (require_list(one, 3) for one in require_list(header.get("other_weights", [])))
    ]
    places = deserialize_places(header.get("places"))
    tokens = deserialize_tokens(header["tokens"])
    last = require_count(header["last"]) if "last" in header else -1
    if last >= len(runs):
        raise ValueError(f"run {last} is the last one, but there are {len(runs)}")
    return Recording(require_text(header["model"]), runs, missed, tokens, notes, places, other_weights, last)


def deserialize_tokens(found: Any) -> Any:
    """Return the words of one batch row or of each, or those of both axes."""
    if found is None:
        return None
    if isinstance(found, dict):
        axes = ("rows", "columns", *(["read"] if "read" in found else []))
        return {axis: deserialize_tokens(require_list(found[axis])) for axis in axes}
    return [
        require_text(one) if isinstance(one, str) else [require_text(word) for word in require_list(one)]
        for one in require_list(found)
    ]


def deserialize_run(found: dict[str, Any], tensors: dict[str, Tensor]) -> Run:
    """Build a run from its part of the header."""
    steps = {require_count(int(step)): name for step, name in found["turns"].items()}
    rows = {name: require_rows(tensors[name]) for name in set(steps.values())}
    words = TextPair.from_tokens(deserialize_tokens(found.get("tokens")))  # absent in older files, as the ids
    run = Run(parent_rows={step: rows[name] for step, name in steps.items()}, tokens=words)
    run.read_ids = {require_text(path): [(0, require_ids(tensors[name]))] for path, name in found.get("ids", {}).items()}
    run.rows = [
        None if row is None else require_count(row) for row in require_list(found.get("rows", []))
    ]  # older files have none
    turns, masks = ParentRowsChecker(run.parent_rows), MaskReader(tensors)
    histories: list[KVHistory] = []
    for one in require_list(found["strands"]):
        history = deserialize_history(one, run.parent_rows, tensors, masks)
        turns.check_history(history)
        histories.append(history)
        if one["key"] is not None:
            name, kind, visit, turn = require_list(one["key"], 4)
            if (name, kind) != (history.name, history.kind):
                raise ValueError(f"{history.name} is stored under the key of {name!r:.40}")
            run.histories[name, kind, require_count(visit), require_count(turn)] = history
    implicit = [deserialize_implicit(one, run, tensors, masks) for one in require_list(found.get("implicit", []))]  # as above
    for number, stored in found["calls"]:
        if require_count(number) < len(histories):
            owner = histories[number]
            run.calls.append(Call(owner, owner.stored_calls[require_count(stored)]))
        else:
            other = implicit[number - len(histories)]
            run.calls.append(ImplicitCall(other, other.stored_calls[require_count(stored)]))
    return run


def deserialize_implicit(found: dict[str, Any], run: Run, tensors: dict[str, Tensor], masks: MaskReader) -> ImplicitHistory:
    """Build the history of a recurrence, and add it to its run under its key."""
    history = implicit_serialization.deserialize_history(found, tensors, masks)
    if found["key"] is not None:
        name, kind, visit, turn = require_list(found["key"], 4)
        if (name, kind) != (history.name, history.kind):
            raise ValueError(f"{history.name} is stored under the key of {name!r:.40}")
        run.implicit_histories[name, kind, require_count(visit), require_count(turn)] = history
    return history


def deserialize_history(
    found: dict[str, Any], turns: dict[int, Tensor], tensors: dict[str, Tensor], masks: MaskReader
) -> KVHistory:
    """Build a history from its part of the header, and check that every call of it is a map."""
    heads = found.get("heads")  # older files have none of these
    chosen = None if heads is None else tuple(require_count(head) for head in require_list(heads))
    history = KVHistory(
        require_text(found["name"]),
        require_text(found["kind"]),
        turns,
        past=require_count(found["past"]),
        selected_heads=chosen,
        block=None if found.get("block") is None else require_text(found["block"]),
        links=None if found.get("links") is None else deserialize_links(found["links"]),
    )
    if history.kind not in KINDS:
        raise ValueError(f"kind must be self or cross, got {history.kind!r}")
    for name, step in require_list(found["keys"]):
        history.keys.append(require_four_axes(tensors[name]))
        history.steps.append(require_count(step))
    history.stored_calls.extend(deserialize_call(one, tensors, masks) for one in require_list(found["pieces"]))
    if not history.stored_calls or not history.keys:
        raise ValueError(f"{history.name} has no calls")
    check_keys(history)
    for former, stored in zip([None, *history.stored_calls], history.stored_calls, strict=False):
        check_call(history, stored)
        if former is not None and history.kind == "self" and stored.stop <= former.stop:
            raise ValueError(f"{history.name}: a call with {stored.stop} keys continues one with {former.stop}")
    return history


def deserialize_links(found: Any) -> LayerLinks:
    """Build the links of a history from its part of the header."""
    forward, number, beside = require_list(found, 3)
    return LayerLinks(require_count(forward), require_count(number), frozenset(map(require_count, require_list(beside))))


def deserialize_part(found: Any) -> CallPart:
    """Build the part of a call from its part of the header."""
    tokens, can_be_rows, places = require_list(found, 3)
    part = CallPart(require_count(tokens), require_bool(can_be_rows))
    if places is None:
        return part
    first, last = map(require_integer, require_list(places, 2))
    return part._replace(row_range=(first, last))


def deserialize_call(found: dict[str, Any], tensors: dict[str, Tensor], masks: MaskReader) -> StoredCall:
    """Build a stored call from its part of the header."""
    names = {name: found.get(name) for name in CALL_TENSORS}
    named: dict[str, Any] = {name: None if x is None or name == "bias" else tensors[x] for name, x in names.items()}
    if names["bias"] is not None:
        named["bias"] = require_bias(names["bias"], tensors)
    if named["q"] is None or require_four_axes(named["q"]).dtype not in REAL:
        raise ValueError("queries must be floating-point numbers with four axes")
    unreal = [name for name, x in named.items() if x is not None and x.dtype not in REAL]
    if unreal:
        raise ValueError(f"{unreal[0]} must be floating-point numbers, got {named[unreal[0]].dtype}")
    scale, softcap = (None if found[name] is None else require_finite(found[name]) for name in ("scale", "softcap"))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    offset = require_offset(found["offset"])
    first, stop, step = (require_count(found[name]) for name in CALL_NUMBERS)
    mask = masks.deserialize_mask(found["mask"])
    q, weight = named["q"], named["weight"]
    if weight is not None and weight.shape != q.shape[3:]:
        raise ValueError(f"a weight {tuple(weight.shape)} of additive scores does not fit queries {tuple(q.shape)}")
    given: dict[str, Any] = {field: named[name] for name, field in CALL_TENSORS.items()}
    if "part" in found:  # absent in older files
        given["part"] = deserialize_part(found["part"])
    return StoredCall(**given, first=first, stop=stop, step=step, mask=mask, offset=offset, scale=scale, softcap=softcap)
