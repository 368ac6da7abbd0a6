"""Consistency checks of histories read from a file: shapes, keys and batch rows must fit each other."""

from bisect import bisect_right
from itertools import accumulate

from torch import Tensor

from regard.observe.files.header_values import require_four_axes
from regard.observe.stored_calls.kv_history import KVHistory, StoredCall


class ParentRowsChecker:
    """The parent rows at the steps of a run, and checks of them that are computed once for all histories."""

    def __init__(self, turns: dict[int, Tensor]) -> None:
        self.steps = sorted(turns)
        self.sizes = [len(turns[step]) for step in self.steps]
        highest = {id(rows): int(rows.max()) if len(rows) else -1 for rows in turns.values()}
        self.highest = [highest[id(turns[step])] for step in self.steps]
        outside = (high >= size for high, size in zip(self.highest[1:], self.sizes, strict=False))
        self.outside = [0, *accumulate(outside, initial=0)]  # number of entries up to each that continue rows that do not exist

    def check_history(self, history: KVHistory) -> None:
        """Raise ValueError if queries or keys have wrong batch rows, or a step continues batch rows that do not exist."""
        keys, calls = history.steps, [stored.step for stored in history.stored_calls]
        if self.steps and (keys != sorted(keys) or calls != sorted(calls) or keys[-1] > calls[-1]):
            raise ValueError(f"{history.name}: its calls are not in the order of their steps")
        sizes: dict[int, set[int]] = {}
        for step, x in (*zip(history.steps, history.keys, strict=True), *((one.step, one.q) for one in history.stored_calls)):
            sizes.setdefault(step, set()).add(len(x))
        start, stop = (bisect_right(self.steps, step) for step in (min(sizes), max(sizes)))
        size = min(sizes[min(sizes)])
        if start < stop and (self.highest[start] >= size or self.outside[stop] > self.outside[start + 1]):
            raise ValueError(f"{history.name}: a step continues batch rows that do not exist")
        for step in sorted(sizes):
            turn = bisect_right(self.steps, step)
            rows = size if turn == start else self.sizes[turn - 1]
            if sizes[step] != {rows}:
                raise ValueError(
                    f"{history.name}: step {step} has {rows} batch rows, but its queries and keys have {sorted(sizes[step])}"
                )


def check_keys(history: KVHistory) -> None:
    """Raise ValueError if the keys of a history do not fit each other."""
    first, total = history.keys[0], sum(keys.shape[2] for keys in history.keys)
    for keys in history.keys:
        if (keys.shape[1], keys.shape[3], keys.dtype) != (first.shape[1], first.shape[3], first.dtype):
            raise ValueError(f"{history.name}: keys {tuple(keys.shape)} do not match keys {tuple(first.shape)}")
    if history.total > total or history.past > total:
        raise ValueError(
            f"{history.name}: expected {history.total} keys, {history.past} of them before its queries; got {total}"
        )
    if history.selected_heads is not None and len(set(history.selected_heads)) != len(history.selected_heads):
        raise ValueError(f"{history.name}: heads {history.selected_heads} are not distinct")


def check_call(history: KVHistory, stored: StoredCall) -> None:
    """Raise ValueError if a stored call and its history's keys are no map."""
    b, h, q, d = stored.q.shape
    keys = history.keys[0]
    if history.selected_heads is not None and len(history.selected_heads) != h:
        raise ValueError(f"{history.name}: {h} heads have the numbers {history.selected_heads}")
    if keys.shape[3] != d or h % keys.shape[1] or keys.dtype != stored.q.dtype:
        raise ValueError(f"{history.name}: keys {tuple(keys.shape)} do not fit queries {tuple(stored.q.shape)}")
    if not 0 <= stored.first < stored.stop <= history.total:
        raise ValueError(f"{history.name}: keys {stored.first} to {stored.stop} are out of range: there are {history.total}")
    keys_seen = stored.stop - stored.first
    stored.mask.check(q, keys_seen, stored.offset)
    if stored.mask.batch not in (1, b) or stored.mask.heads not in (1, h):
        raise ValueError(f"{history.name}: {stored.mask} does not fit (b, h) = {(b, h)}")
    if isinstance(stored.offset, Tensor) and len(stored.offset) not in (1, b):
        raise ValueError(f"{history.name}: {len(stored.offset)} offsets do not fit {b} batch rows")
    if stored.bias is not None and any(
        m not in (1, n) for m, n in zip(require_four_axes(stored.bias).shape, (b, h, q, keys_seen), strict=True)
    ):
        raise ValueError(f"{history.name}: a bias {tuple(stored.bias.shape)} does not fit {(b, h, q, keys_seen)}")
    if stored.sinks is not None and stored.sinks.shape != (h,):
        raise ValueError(f"{history.name}: sinks {tuple(stored.sinks.shape)} do not fit {h} heads")
    if stored.v is not None and require_four_axes(stored.v).shape[:2] != (b, keys.shape[1]):
        raise ValueError(f"{history.name}: values {tuple(stored.v.shape)} do not fit the keys")
    if stored.residual is not None and (stored.residual.dim() != 3 or stored.residual.shape[:2] != (b, q)):
        raise ValueError(f"{history.name}: a residual stream {tuple(stored.residual.shape)} does not fit the queries")
