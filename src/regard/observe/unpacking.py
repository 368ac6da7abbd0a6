"""Deserialization of a recording from its header and named tensors; everything from a file is checked before it is used.

The time is linear in the size of the file, independent of what the header states: what many calls share is checked once.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.mechanism.arguments import check_instance, check_path
from regard.mechanism.masks import Causal, Documents, Given, Padding, Prefix, Window
from regard.mechanism.rule import EVERYTHING, And, Everything, Mask, Not, Or
from regard.observe import files
from regard.observe.consistency import Turns, check, check_keys
from regard.observe.doors.passage import Missed
from regard.observe.header_values import REAL, four, listed, number, real, rows_of, text, whole
from regard.observe.packing import PIECE_NUMBERS, PIECE_TENSORS
from regard.observe.recording import KINDS, Call, Recording, Run
from regard.observe.strand import Piece, Strand

DEEPEST = 64  # nesting of composed rules
WRONG = (RegardError, ValueError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError, OverflowError)


def load(path: str | Path, *, verify: bool = True) -> Recording:
    """Return the recording in a file that recording.save wrote, with memory-mapped tensors.

    `verify` reads the whole file once and compares every tensor with its checksum; otherwise tensors are read when needed and
    only the header is compared. Files before version 3 have no checksums.
    Raises DataError, stating what was expected, if the file is missing, truncated, damaged, foreign or newer.
    """
    header, tensors = files.read(Path(check_path("path", path)), check_instance("verify", verify, bool))
    try:
        return unpack(header, tensors)
    except WRONG as error:
        raise files.damaged(path, error) from None


def unpack(header: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    """Build the recording of a header and its tensors. Raises ValueError, TypeError or LookupError if they are inconsistent."""
    tokens = header["tokens"]
    if isinstance(tokens, dict):
        axes = ("rows", "columns", *(["read"] if "read" in tokens else []))
        tokens = {axis: unpack_tokens(listed(tokens[axis])) for axis in axes}
    else:
        tokens = unpack_tokens(tokens)
    missed = [Missed(*(text(part) for part in listed(one, 3))) for one in listed(header["missed"])]
    return Recording(text(header["model"]), [unpack_run(run, tensors) for run in listed(header["runs"])], missed, tokens)


def unpack_tokens(found: Any) -> Any:
    """Return the words of one batch row or of each."""
    if found is None:
        return None
    return [text(one) if isinstance(one, str) else [text(word) for word in listed(one)] for one in listed(found)]


def unpack_run(found: dict[str, Any], tensors: dict[str, Tensor]) -> Run:
    """Build a run from its part of the header."""
    steps = {number(int(step)): name for step, name in found["turns"].items()}
    rows = {name: rows_of(tensors[name]) for name in set(steps.values())}
    run = Run(turns={step: rows[name] for step, name in steps.items()})
    run.rows = [None if row is None else number(row) for row in listed(found.get("rows", []))]  # older files have none
    turns, rules = Turns(run.turns), Rules(tensors)
    strands = []
    for one in listed(found["strands"]):
        strand = unpack_strand(one, run.turns, tensors, rules)
        turns.check(strand)
        strands.append(strand)
        if one["key"] is not None:
            name, kind, visit, turn = listed(one["key"], 4)
            if (name, kind) != (strand.name, strand.kind):
                raise ValueError(f"{strand.name} has the key of {name!r:.40}")
            run.strands[name, kind, number(visit), number(turn)] = strand
    for strand, piece in found["calls"]:
        owner = strands[number(strand)]
        run.calls.append(Call(owner, owner.pieces[number(piece)]))
    return run


def unpack_strand(found: dict[str, Any], turns: dict[int, Tensor], tensors: dict[str, Tensor], rules: "Rules") -> Strand:
    """Build a history from its part of the header, and check that every call of it is a map."""
    heads = found.get("heads")  # older files have none of these
    chosen = None if heads is None else tuple(number(head) for head in listed(heads))
    strand = Strand(text(found["name"]), text(found["kind"]), turns, past=number(found["past"]), chosen=chosen)
    if strand.kind not in KINDS:
        raise ValueError(f"a kind is self or cross, not {strand.kind!r}")
    for name, step in listed(found["keys"]):
        strand.keys.append(four(tensors[name]))
        strand.steps.append(number(step))
    strand.pieces.extend(unpack_piece(one, tensors, rules) for one in listed(found["pieces"]))
    if not strand.pieces or not strand.keys:
        raise ValueError(f"{strand.name} has no call")
    check_keys(strand)
    for former, piece in zip([None, *strand.pieces], strand.pieces, strict=False):
        check(strand, piece)
        if former is not None and strand.kind == "self" and piece.stop <= former.stop:
            raise ValueError(f"{strand.name}: a call that continues one of {former.stop} keys has {piece.stop}")
    return strand


def unpack_piece(found: dict[str, Any], tensors: dict[str, Tensor], rules: "Rules") -> Piece:
    """Build a stored call from its part of the header."""
    named = {name: None if found.get(name) is None else tensors[found[name]] for name in PIECE_TENSORS}
    if named["q"] is None or four(named["q"]).dtype not in REAL:
        raise ValueError("queries are floating numbers with four axes")
    unreal = [name for name, x in named.items() if x is not None and x.dtype not in REAL]
    if unreal:
        raise ValueError(f"{unreal[0]} are floating numbers, not {getattr(named[unreal[0]], 'dtype', None)}")
    scale, softcap = (None if found[name] is None else real(found[name]) for name in ("scale", "softcap"))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"a softcap is above 0, not {softcap}")
    offset = found["offset"]
    offset = torch.tensor([whole(one) for one in offset]) if isinstance(offset, list) else whole(offset)
    first, stop, step = (number(found[name]) for name in PIECE_NUMBERS)
    mask = rules.unpack(found["mask"])
    q, values, bias, sinks, weight = (named[name] for name in PIECE_TENSORS)
    assert q is not None
    if weight is not None and weight.shape != q.shape[3:]:
        raise ValueError(f"a weight {tuple(weight.shape)} of additive scores does not fit queries {tuple(q.shape)}")
    return Piece(q, values, first, stop, step, mask, offset, scale, softcap, bias, sinks, weight)


class Rules:
    """The rules of a file, each built once, however many calls share it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.made: dict[str, Mask] = {}

    def unpack(self, found: list[Any], depth: int = DEEPEST) -> Mask:
        """Return the rule of a list."""
        if not depth:
            raise ValueError("rules joined too deeply")
        written = json.dumps(found)
        if written not in self.made:
            self.made[written] = self.make(*listed(found), depth=depth - 1)
        return self.made[written]

    def make(self, name: str, *parts: Any, depth: int) -> Mask:
        """Build a rule from its name and its parts."""
        if name in ("And", "Or"):
            one, other = (self.unpack(part, depth) for part in listed([*parts], 2))
            return And(one, other) if name == "And" else Or(one, other)
        if name == "Not":
            return Not(self.unpack(listed([*parts], 1)[0], depth))
        if name == "Given":
            table = four(self.tensors[parts[0]])
            if table.dtype != torch.bool:
                raise ValueError(f"a table of who sees whom is bool, not {table.dtype}")
            return Given.sharing(table)
        if name == "Documents":
            queries, keys = (None if part is None else self.tensors[part] for part in listed([*parts], 2))
            return Documents(queries, keys)  # type: ignore[arg-type]
        plain = {"Everything": Everything, "Causal": Causal, "Window": Window, "Prefix": Prefix, "Padding": Padding}
        rule: Mask = plain[name](*parts)
        return EVERYTHING if isinstance(rule, Everything) else rule
