"""The token ids that the forwards of a run read: found in the call of the model, or where a module looks up embeddings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.observe.interception.provenance import ModuleFrame
from regard.observe.stored_calls.kv_history import KVHistory

IDS = ("decoder_input_ids", "input_ids")
IdParts = list[tuple[int, Tensor | None]]  # by forward: its step, (b, t) token ids, None where they are unknown
ENCODER = "encoder"


def find_token_ids(args: Any, kwargs: Any, has_source: bool = False) -> Tensor | None:
    """Return a copy of the token ids (b, t) among a module's arguments; None if there are none.

    With `has_source` only those of a decoder: others are of the text that its encoder reads.
    """
    if args and isinstance(args[0], Mapping):
        args, kwargs = (), {**args[0], **kwargs}
    names, args = (IDS[:1], ()) if has_source else (IDS, args)
    return copy_ids(next((kwargs[name] for name in names if kwargs.get(name) is not None), args[0] if args else None), (2,))


def copy_ids(x: Any, dims: tuple[int, ...] = (1, 2)) -> Tensor | None:
    """Return a copy (b, t) in int64 of a tensor of token ids; None for anything else."""
    if not isinstance(x, Tensor) or x.is_nested or x.dim() not in dims or x.dtype not in (torch.int64, torch.int32):
        return None
    ids = x.detach().to(torch.int64, copy=True)
    return ids if ids.dim() == 2 else ids.unsqueeze(0)


def find_looked_up_ids(frames: Sequence[ModuleFrame], b: int, t: int, is_decoder: bool) -> Tensor | None:
    """Return a copy of the ids (b, t) of which a running module made the t tokens of an attention call; None if unknown.

    They are those that the innermost module looked up first, or last in a decoder, whose module may have looked up its source
    first. Consecutive numbers are positions.
    """
    for frame in reversed(frames):
        found = [x for x in frame.ids if x.shape in ((b, t), (t, b)) or (b == 1 and x.shape == (t,))]
        found = [x for x in found if t == 1 or not bool((x.diff(dim=x.shape.index(t)) == 1).all())]
        if found:
            ids = copy_ids(found[-1 if is_decoder else 0])
            return ids.mT if ids is not None and ids.shape != (b, t) else ids
    return None


def truncate_tokens(parts: IdParts, known: int) -> Iterator[tuple[int, Tensor | None]]:
    """Yield the first `known` tokens of a list of parts."""
    for step, ids in parts:
        if known > 0:
            yield step, None if ids is None else ids[:, :known]
        known -= 0 if ids is None else ids.shape[1]


def join_tokens(parts: IdParts, parent_rows: dict[int, Tensor]) -> Tensor | None:
    """Return the tokens (b, t) of parts, after those that are unknown, in the rows of the last step; None if all are."""
    unknown = max((n for n, (_, ids) in enumerate(parts) if ids is None), default=-1)  # such as embeddings
    parts = parts[unknown + 1 :]
    history, last = KVHistory("", "self", parent_rows), parts[-1][0] if parts else 0
    fed = [history.reorder_rows(ids, step, last) for step, ids in parts if ids is not None]
    return torch.cat(fed, 1).cpu() if len({len(ids) for ids in fed}) == 1 else None


def find_side(path: str) -> str:
    """Return "encoder" or "decoder" for a module in one, by the outermost such component of its path; else ""."""
    return next((side for part in path.split(".") for side in (ENCODER, "decoder") if part.startswith(side)), "")


def list_ids(read: Mapping[str, IdParts], parent_rows: dict[int, Tensor]) -> dict[str, Tensor]:
    """Return the token ids (b, t) by the path of the module that read them: of those alone of which all are known."""
    known = {path: parts for path, parts in read.items() if parts and all(ids is not None for _, ids in parts)}
    found = {path: join_tokens(parts, parent_rows) for path, parts in known.items()}
    return {path: ids for path, ids in found.items() if ids is not None}
