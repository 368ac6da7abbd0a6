"""A recording of its header and named tensors; what comes from a file is checked before anything is built on it."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.mechanism.masks import Causal, Documents, Given, Padding, Prefix, Window
from regard.mechanism.rule import EVERYTHING, And, Everything, Mask, Not, Or
from regard.observe import files
from regard.observe.doors.passage import Missed
from regard.observe.packing import PIECE_NUMBERS, PIECE_TENSORS
from regard.observe.recording import KINDS, Call, Recording, Run
from regard.observe.strand import Piece, Strand

DEEPEST = 64  # rules joined within each other
WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError, OverflowError)


def load(path: str | Path) -> Recording:
    """The recording in a file that recording.save wrote, its tensors mapped from there as they are needed.

    Raises DataError, saying what was expected, where the file is missing, truncated, damaged, foreign or newer.
    """
    header, tensors = files.read(Path(path))
    try:
        return unpack(header, tensors)
    except WRONG as error:
        raise files.damaged(path, error) from None


def unpack(header: dict[str, Any], tensors: dict[str, Tensor]) -> Recording:
    """The recording of a header and its tensors. Raises ValueError, TypeError or LookupError where it makes no sense."""
    tokens = header["tokens"]
    if isinstance(tokens, dict):
        axes = ("rows", "columns", *(["read"] if "read" in tokens else []))
        tokens = {axis: unpack_tokens(listed(tokens[axis])) for axis in axes}
    else:
        tokens = unpack_tokens(tokens)
    missed = [Missed(*(text(part) for part in listed(one, 3))) for one in listed(header["missed"])]
    return Recording(text(header["model"]), [unpack_run(run, tensors) for run in listed(header["runs"])], missed, tokens)


def unpack_tokens(found: Any) -> Any:
    """Words of one batch row or of each."""
    if found is None:
        return None
    return [text(one) if isinstance(one, str) else [text(word) for word in listed(one)] for one in listed(found)]


def unpack_run(found: dict[str, Any], tensors: dict[str, Tensor]) -> Run:
    """A run of its header."""
    run = Run(turns={int(step): rows_of(tensors[name]) for step, name in found["turns"].items()})
    strands = []
    for one in listed(found["strands"]):
        strand = unpack_strand(one, run.turns, tensors)
        strands.append(strand)
        if one["key"] is not None:
            name, kind, visit, turn = listed(one["key"], 4)
            run.strands[text(name), text(kind), number(visit), number(turn)] = strand
    for strand, piece in found["calls"]:
        owner = strands[number(strand)]
        run.calls.append(Call(owner, owner.pieces[number(piece)]))
    return run


def unpack_strand(found: dict[str, Any], turns: dict[int, Tensor], tensors: dict[str, Tensor]) -> Strand:
    """A strand of its header, every call of it checked to be a map."""
    heads = found.get("heads")  # files of before it was said have none
    chosen = None if heads is None else tuple(number(head) for head in listed(heads))
    strand = Strand(text(found["name"]), text(found["kind"]), turns, past=number(found["past"]), chosen=chosen)
    if strand.kind not in KINDS:
        raise ValueError(f"a kind is self or cross, not {strand.kind!r}")
    for name, step in listed(found["keys"]):
        strand.keys.append(four(tensors[name]))
        strand.steps.append(number(step))
    strand.pieces.extend(unpack_piece(one, tensors) for one in listed(found["pieces"]))
    if not strand.pieces or not strand.keys:
        raise ValueError(f"{strand.name} has no call")
    check_rows(strand)
    for piece in strand.pieces:
        check(strand, piece)
    return strand


def check_rows(strand: Strand) -> None:
    """Raises where queries or keys of a step have other batch rows than it, or it continues rows that were not there."""
    sizes: dict[int, set[int]] = {}
    for step, x in (*zip(strand.steps, strand.keys, strict=True), *((piece.step, piece.q) for piece in strand.pieces)):
        sizes.setdefault(step, set()).add(len(x))
    size = -1  # not known yet
    for step in sorted({*sizes, *(step for step in strand.turns if min(sizes) < step <= max(sizes))}):
        rows = strand.turns.get(step) if size >= 0 else None
        if rows is not None and len(rows) and int(rows.max()) >= size:
            raise ValueError(f"{strand.name}: batch rows {rows.tolist()} of {size}")
        size = len(rows) if rows is not None else size if size >= 0 else min(sizes[step])
        if sizes.get(step, {size}) != {size}:
            raise ValueError(f"{strand.name}: step {step} has {size} batch rows, its queries and keys {sorted(sizes[step])}")


def check(strand: Strand, piece: Piece) -> None:
    """Raises where a call and its strand's keys are no map."""
    b, h, q, d = piece.q.shape
    if strand.chosen is not None and len(set(strand.chosen)) != h:
        raise ValueError(f"{strand.name}: {h} heads are numbered {strand.chosen}")
    for keys in strand.keys:
        if keys.shape[3] != d or h % max(keys.shape[1], 1) or keys.dtype != piece.q.dtype:
            raise ValueError(f"{strand.name}: keys {tuple(keys.shape)} do not fit queries {tuple(piece.q.shape)}")
    if not 0 <= piece.first < piece.stop <= strand.total:
        raise ValueError(f"{strand.name}: keys {piece.first} to {piece.stop} of {strand.total}")
    keys_seen = piece.stop - piece.first
    piece.mask.check(q, keys_seen, piece.offset)
    if piece.mask.batch not in (1, b) or piece.mask.heads not in (1, h):
        raise ValueError(f"{strand.name}: {piece.mask} is for other rows or heads than {(b, h)}")
    if piece.bias is not None and any(
        m not in (1, n) for m, n in zip(four(piece.bias).shape, (b, h, q, keys_seen), strict=True)
    ):
        raise ValueError(f"{strand.name}: a bias {tuple(piece.bias.shape)} does not fit {(b, h, q, keys_seen)}")
    if piece.sinks is not None and piece.sinks.shape != (h,):
        raise ValueError(f"{strand.name}: sinks {tuple(piece.sinks.shape)} for {h} heads")
    if piece.values is not None and four(piece.values).shape[:2] != (b, strand.keys[0].shape[1]):
        raise ValueError(f"{strand.name}: values {tuple(piece.values.shape)} do not fit the keys")


def unpack_piece(found: dict[str, Any], tensors: dict[str, Tensor]) -> Piece:
    """A call of its header."""
    named = {name: None if found.get(name) is None else tensors[found[name]] for name in PIECE_TENSORS}
    if named["q"] is None or not four(named["q"]).is_floating_point():
        raise ValueError("queries are floating numbers with four axes")
    scale, softcap = (None if found[name] is None else real(found[name]) for name in ("scale", "softcap"))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"a softcap is above 0, not {softcap}")
    offset = found["offset"]
    offset = torch.tensor([whole(one) for one in offset]) if isinstance(offset, list) else whole(offset)
    first, stop, step = (number(found[name]) for name in PIECE_NUMBERS)
    mask = unpack_rule(found["mask"], tensors, DEEPEST)
    q, values, bias, sinks, weight = (named[name] for name in PIECE_TENSORS)
    assert q is not None
    if weight is not None and (weight.shape != q.shape[3:] or not weight.is_floating_point()):
        raise ValueError(f"a weight {tuple(weight.shape)} of additive scores does not fit queries {tuple(q.shape)}")
    return Piece(q, values, first, stop, step, mask, offset, scale, softcap, bias, sinks, weight)


def unpack_rule(found: list[Any], tensors: dict[str, Tensor], depth: int) -> Mask:
    """A rule of its list."""
    name, *parts = listed(found)
    if not depth:
        raise ValueError("rules joined too deeply")
    if name in ("And", "Or"):
        one, other = (unpack_rule(part, tensors, depth - 1) for part in listed(parts, 2))
        return And(one, other) if name == "And" else Or(one, other)
    if name == "Not":
        return Not(unpack_rule(listed(parts, 1)[0], tensors, depth - 1))
    if name == "Given":
        table = four(tensors[parts[0]])
        if table.dtype != torch.bool:
            raise ValueError(f"a table of who sees whom is bool, not {table.dtype}")
        return Given.sharing(table)
    if name == "Documents":
        queries, keys = (None if part is None else tensors[part] for part in listed(parts, 2))
        return Documents(queries, keys)  # type: ignore[arg-type]
    plain = {"Everything": Everything, "Causal": Causal, "Window": Window, "Prefix": Prefix, "Padding": Padding}
    rule: Mask = plain[name](*parts)
    return EVERYTHING if isinstance(rule, Everything) else rule


def listed(x: Any, length: int | None = None) -> list[Any]:
    """x, which must be a list, of this length."""
    if not isinstance(x, list) or length not in (None, len(x)):
        raise TypeError(f"expected a list{'' if length is None else f' of {length}'}, got {type(x).__name__}")
    return x


def text(x: Any) -> str:
    """x, which must be a text."""
    if not isinstance(x, str):
        raise TypeError(f"expected a text, got {type(x).__name__}")
    return x


def whole(x: Any) -> int:
    """x, which must be a whole number that torch can hold."""
    if not isinstance(x, int) or isinstance(x, bool) or abs(x) > 2**62:
        raise TypeError(f"expected a whole number, got {x!r:.40}")
    return x


def number(x: Any) -> int:
    """x, which must be a whole number from 0."""
    if whole(x) < 0:
        raise ValueError(f"expected a number from 0, got {x}")
    return int(x)


def real(x: Any) -> float:
    """x, which must be a finite number."""
    if not isinstance(x, int | float) or isinstance(x, bool) or not math.isfinite(x):
        raise TypeError(f"expected a finite number, got {x!r:.40}")
    return float(x)


def four(x: Tensor) -> Tensor:
    """x, which must have four axes."""
    if x.dim() != 4:
        raise ValueError(f"expected four axes, got {tuple(x.shape)}")
    return x


def rows_of(x: Tensor) -> Tensor:
    """x, which must be batch rows by number."""
    if x.dim() != 1 or x.dtype != torch.int64 or (len(x) and int(x.min()) < 0):
        raise ValueError(f"expected batch rows (b,), got {x.dtype} {tuple(x.shape)}")
    return x
