"""Consistency checks of histories read from a file: shapes, keys and batch rows must fit each other."""

from bisect import bisect_right
from itertools import accumulate

from torch import Tensor

from regard.observe.header_values import require_four_axes
from regard.observe.kv_history import KVHistory, StoredCall


class ParentRowsChecker:
    """The parent rows at the steps of a run, and checks of them that are computed once for all histories."""

    def __init__(self, turns: dict[int, Tensor]) -> None:
        self.steps = sorted(turns)
        self.sizes = [len(turns[step]) for step in self.steps]
        highest = {id(rows): int(rows.max()) if len(rows) else -1 for rows in turns.values()}
        self.highest = [highest[id(turns[step])] for step in self.steps]
        outside = (high >= size for high, size in zip(self.highest[1:], self.sizes, strict=False))
        self.outside = [0, *accumulate(outside, initial=0)]  # number of entries up to each that continue rows that do not exist

    def check_history(self, strand: KVHistory) -> None:
        """Raise ValueError if queries or keys have wrong batch rows, or a step continues batch rows that do not exist."""
        keys, calls = strand.steps, [piece.step for piece in strand.stored_calls]
        if self.steps and (keys != sorted(keys) or calls != sorted(calls) or keys[-1] > calls[-1]):
            raise ValueError(f"{strand.name}: its calls are not in the order of their steps")
        sizes: dict[int, set[int]] = {}
        for step, x in (*zip(strand.steps, strand.keys, strict=True), *((one.step, one.q) for one in strand.stored_calls)):
            sizes.setdefault(step, set()).add(len(x))
        start, stop = (bisect_right(self.steps, step) for step in (min(sizes), max(sizes)))
        size = min(sizes[min(sizes)])
        if start < stop and (self.highest[start] >= size or self.outside[stop] > self.outside[start + 1]):
            raise ValueError(f"{strand.name}: a step continues batch rows that are not there")
        for step in sorted(sizes):
            turn = bisect_right(self.steps, step)
            rows = size if turn == start else self.sizes[turn - 1]
            if sizes[step] != {rows}:
                raise ValueError(
                    f"{strand.name}: step {step} has {rows} batch rows, its queries and keys {sorted(sizes[step])}"
                )


def check_keys(strand: KVHistory) -> None:
    """Raise ValueError if the keys of a history do not fit each other."""
    first, total = strand.keys[0], sum(keys.shape[2] for keys in strand.keys)
    for keys in strand.keys:
        if (keys.shape[1], keys.shape[3], keys.dtype) != (first.shape[1], first.shape[3], first.dtype):
            raise ValueError(f"{strand.name}: keys {tuple(keys.shape)} do not go with keys {tuple(first.shape)}")
    if strand.total > total or strand.past > total:
        raise ValueError(f"{strand.name}: {strand.total} keys, {strand.past} of them before its queries; it has {total}")
    if strand.selected_heads is not None and len(set(strand.selected_heads)) != len(strand.selected_heads):
        raise ValueError(f"{strand.name}: heads {strand.selected_heads} are numbered twice")


def check_call(strand: KVHistory, piece: StoredCall) -> None:
    """Raise ValueError if a stored call and its history's keys are no map."""
    b, h, q, d = piece.q.shape
    keys = strand.keys[0]
    if strand.selected_heads is not None and len(strand.selected_heads) != h:
        raise ValueError(f"{strand.name}: {h} heads are numbered {strand.selected_heads}")
    if keys.shape[3] != d or h % keys.shape[1] or keys.dtype != piece.q.dtype:
        raise ValueError(f"{strand.name}: keys {tuple(keys.shape)} do not fit queries {tuple(piece.q.shape)}")
    if not 0 <= piece.first < piece.stop <= strand.total:
        raise ValueError(f"{strand.name}: keys {piece.first} to {piece.stop} of {strand.total}")
    keys_seen = piece.stop - piece.first
    piece.mask.check(q, keys_seen, piece.offset)
    if piece.mask.batch not in (1, b) or piece.mask.heads not in (1, h):
        raise ValueError(f"{strand.name}: {piece.mask} is for other rows or heads than {(b, h)}")
    if isinstance(piece.offset, Tensor) and len(piece.offset) not in (1, b):
        raise ValueError(f"{strand.name}: {len(piece.offset)} offsets for {b} batch rows")
    if piece.bias is not None and any(
        m not in (1, n) for m, n in zip(require_four_axes(piece.bias).shape, (b, h, q, keys_seen), strict=True)
    ):
        raise ValueError(f"{strand.name}: a bias {tuple(piece.bias.shape)} does not fit {(b, h, q, keys_seen)}")
    if piece.sinks is not None and piece.sinks.shape != (h,):
        raise ValueError(f"{strand.name}: sinks {tuple(piece.sinks.shape)} for {h} heads")
    if piece.values is not None and require_four_axes(piece.values).shape[:2] != (b, keys.shape[1]):
        raise ValueError(f"{strand.name}: values {tuple(piece.values.shape)} do not fit the keys")
