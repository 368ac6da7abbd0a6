"""What is kept of one attention module in one run: the queries of every step, the keys once, and the rules of who saw whom."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import TooLargeError
from regard.map import AttentionMap
from regard.mechanism.masks import Causal, Documents, Given, Window
from regard.mechanism.rule import EVERYTHING, Mask, Offset
from regard.observe.rules import ROWS, beginnings, beside, first_keys, first_queries

SIMILAR = 0.3  # of a key's size: how far a key read back from a cache that rounds may be from what was put in
LIMIT = 2**30  # entries of a table of a whole run


class Place(NamedTuple):
    """Where keys of a cache belong in a strand."""

    known: int  # keys of the strand that live on
    first: int  # the strand's key that is the cache's first
    slot: int  # of the cache's first new key
    rows: Tensor | None  # the row that each batch row was; None where none has moved
    apart: float  # how far the keys read back are from those that were put in, of their size


class Rows(NamedTuple):
    """Which of our batch rows others are, and how far they are from them, of their size."""

    moved: Tensor | None  # None where each is its own
    apart: float


@dataclass(eq=False)
class Piece:
    """One call: its queries, and which of the strand's keys it saw under which rule."""

    q: Tensor  # (b, h, t, d)
    values: Tensor | None  # of its new keys
    first: int  # the strand's key that was its first
    stop: int  # the strand's keys when it ran
    step: int
    mask: Mask  # on its own queries and keys
    offset: Offset
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    sinks: Tensor | None
    weight: Tensor | None = None  # of additive scores

    def seeing(self, q: Tensor, k: Tensor, mask: Mask, bias: Tensor | None, offset: Offset) -> AttentionMap:
        """The map of queries and keys with the scale, the softcap, the sinks and the weight of this call."""
        settings = {name: getattr(self, name) for name in ("scale", "softcap", "sinks", "weight")}
        return AttentionMap(q, k, mask, bias=bias, offset=offset, **settings)


@dataclass(eq=False)
class Strand:
    """The calls of one module in one run, in order; those after the first continue it through a cache."""

    name: str
    kind: str
    turns: "dict[int, Tensor]"  # of the run: step to the batch rows of the step before that live on in it
    pieces: list[Piece] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # (b, g, n, d), new at some step
    steps: list[int] = field(default_factory=list)  # of keys
    past: int = 0  # keys that were there before the first query
    chosen: tuple[int, ...] | None = None  # the numbers in the model of the heads that are kept; None for all

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers in the model of the heads that are kept."""
        return tuple(range(self.pieces[0].q.shape[1])) if self.chosen is None else self.chosen

    @property
    def total(self) -> int:
        """How many keys there are."""
        return self.pieces[-1].stop if self.pieces else sum(x.shape[2] for x in self.keys)

    def found(self, k: Tensor, new: int, kept: Callable[[Tensor], Tensor], told: Tensor | None = None) -> "Place | None":
        """Where the keys of a cache, (b, g, n, d), the last of which are new, continue this strand; None if they do not.

        Where several of our rows could have become one of theirs, `told` says which, if anyone has told.
        """
        total, before = self.total, k.shape[2] - new
        places = [(total, total - 1)] if total <= before else [(total, before - 1), (before, before - 1)]
        found = []
        for known, slot in places:
            if known > 0 and slot >= 0:
                same = same_rows(self.key(known - 1), kept(k[:, :, slot : slot + 1])[:, :, 0], told)
                if same is not None:
                    found.append(Place(known, known - 1 - slot, slot + 1, *same))
                    if not same.apart:
                        break
        return min(found, key=lambda place: place.apart, default=None)  # keys of two words may be alike

    def key(self, index: int) -> Tensor:
        """One key of all rows and heads, (b, g, d), as the rows stood at the last step."""
        start = self.total
        for step, keys in zip(reversed(self.steps), reversed(self.keys), strict=True):
            start -= keys.shape[2]
            if index >= start:
                return self.turned(keys[:, :, index - start], step, self.pieces[-1].step)
        raise IndexError(index)

    def turned(self, x: Tensor, made: int, wanted: int) -> Tensor:
        """Something of the batch rows of one step as those of a later one."""
        rows = None
        steps: Sequence[int] = range(wanted, made, -1)
        if len(steps) > len(self.turns):
            steps = sorted((step for step in self.turns if step in steps), reverse=True)
        for step in steps:
            turn = self.turns.get(step)
            if turn is not None:
                rows = turn if rows is None else turn[rows]
        return x if rows is None else x[rows.to(x.device)]

    def cropped(self, known: int) -> "Strand":
        """The strand of a cache that was cut after its first keys."""
        shorter = replace(self, pieces=[], keys=[], steps=[])
        start = 0
        for keys, step in zip(self.keys, self.steps, strict=True):
            if start < known:
                shorter.keys.append(keys[:, :, : known - start])
                shorter.steps.append(step)
            start += keys.shape[2]
        left = known - self.past
        for piece in self.pieces:
            rows = min(piece.q.shape[2], left)
            if rows > 0:
                shorter.pieces.append(first_rows(piece, rows, known))
            left -= rows
        return shorter

    def joined(self, stop: int, step: int, first: int = 0) -> Tensor:
        """The keys first to stop, (b, g, k, d), of the rows as they stand at a step."""
        parts = [self.turned(keys, made, step) for made, keys in zip(self.steps, self.keys, strict=True)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return whole if (first, stop) == (0, whole.shape[2]) else whole[:, :, first:stop]

    def map_of(self, piece: Piece) -> AttentionMap:
        """The map of one call."""
        keys = self.joined(piece.stop, piece.step, piece.first)
        return piece.seeing(piece.q, keys, piece.mask, piece.bias, piece.offset)

    def map(self) -> AttentionMap:
        """The map of all calls, as if they had been one."""
        if len(self.pieces) == 1:
            return self.map_of(self.pieces[0])
        last = self.pieces[-1]
        step = last.step
        q = torch.cat([self.turned(piece.q, piece.step, step) for piece in self.pieces], 2)
        stop = last.stop
        return last.seeing(q, self.joined(stop, step), self.rule(stop), self.bias(q, stop), self.past)

    def values(self) -> Tensor | None:
        """The values of all keys, (b, g, k, e), where they were kept."""
        if any(piece.values is None for piece in self.pieces):
            return None
        step = self.pieces[-1].step
        parts = [self.turned(piece.values, piece.step, step) for piece in self.pieces if piece.values is not None]
        return parts[0] if self.kind == "cross" else torch.cat(parts, 2)

    def rule(self, stop: int) -> Mask:
        """The rule of all calls on all keys: the plainest one that says what each of them was told, else its table."""
        for rule in self.plainer(stop):
            found = beside(rule, self.past, self.rows(stop))
            if found is not None:
                return found
        tables = [table for _, table in self.rows(stop)]
        rows = sum(table.shape[2] for table in tables)
        if math.prod(widest(tables)) * rows * stop > LIMIT:
            raise TooLargeError(
                f"the rule of {rows:,} queries of many calls on {stop:,} keys has no short form to write it in."
            )
        return Given.sharing(stacked(tables))

    def plainer(self, stop: int) -> Iterator[Mask]:
        """Rules that all calls may follow, apart from keys that are hidden from all."""
        last = self.table(self.pieces[-1], torch.tensor([self.pieces[-1].q.shape[2] - 1]), stop)
        furthest = int((stop - 1 - last.to(torch.uint8).argmax(-1)).max())
        yield from (EVERYTHING, Causal(), Causal() & Window(furthest))
        if not self.past:  # chunks: each query sees from where its chunk begins
            ids = [beginnings(table, queries) for queries, table in self.rows(stop)]
            yield Causal() & Documents(torch.cat([x.expand(max(map(len, ids)), -1) for x in ids], 1))

    def rows(self, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All queries, some at a time, and who of all keys each of them saw."""
        start = 0
        for piece in self.pieces:
            count = piece.q.shape[2]
            for part in torch.arange(count, device=piece.q.device).split(ROWS):
                yield part + start, self.table(piece, part, stop)
            start += count

    def table(self, piece: Piece, queries: Tensor, stop: int) -> Tensor:
        """Which of all keys some queries of a call saw, (b or 1, h or 1, n, k), of the rows of the last step."""
        queries = queries.to(piece.q.device)
        keys = torch.arange(piece.stop - piece.first, device=queries.device)
        seen = piece.mask.block(queries, keys, piece.offset)
        whole = torch.zeros(*seen.shape[:2], len(queries), stop, dtype=torch.bool, device=queries.device)
        whole[..., piece.first : piece.stop] = seen
        return self.turned(whole, piece.step, self.pieces[-1].step) if len(whole) > 1 else whole

    def bias(self, q: Tensor, stop: int) -> Tensor | None:
        """The biases of the calls below each other."""
        if all(piece.bias is None for piece in self.pieces):
            return None
        rows = []
        for piece in self.pieces:
            whole = q.new_zeros(*((1, 1) if piece.bias is None else piece.bias.shape[:2]), piece.q.shape[2], stop)
            if piece.bias is not None:
                whole[..., piece.first : piece.stop] = piece.bias
            rows.append(self.turned(whole, piece.step, self.pieces[-1].step) if len(whole) > 1 else whole)
        return stacked(rows)


def widest(parts: list[Tensor]) -> list[int]:
    """The batch rows and heads of tables some of which are the same for all, (b or 1, h or 1, n, k)."""
    return [max(part.shape[axis] for part in parts) for axis in (0, 1)]


def stacked(parts: list[Tensor]) -> Tensor:
    """The same tables below each other, (b, h, n, k)."""
    return torch.cat([part.expand(*widest(parts), -1, -1) for part in parts], 2)


def first_rows(piece: Piece, rows: int, known: int) -> Piece:
    """A call on its first queries and the strand's first keys alone."""
    keys = min(piece.stop, known) - piece.first
    bias = piece.bias if piece.bias is None else piece.bias[:, :, :rows, :keys]
    mask = first_keys(first_queries(piece.mask, rows), keys)
    values = piece.values if piece.values is None else piece.values[:, :, : piece.values.shape[2] - piece.q.shape[2] + rows]
    return replace(piece, q=piece.q[:, :, :rows], values=values, stop=piece.first + keys, mask=mask, bias=bias)


def same_rows(ours: Tensor, theirs: Tensor, told: Tensor | None = None) -> Rows | None:
    """Which row of ours each row of theirs, (b, g, d), is; None where one of them is none; those told, where they may be it."""
    if told is not None and fitting(ours, theirs, told):
        return Rows(told, 0.0)
    if ours.shape == theirs.shape and torch.equal(ours, theirs):
        return Rows(None, 0.0)
    if ours.shape[1:] != theirs.shape[1:]:
        return None
    apart = (theirs.float().unsqueeze(1) - ours.float()).flatten(2).norm(dim=-1)  # (b theirs, b ours)
    nearest, rows = apart.min(1)
    size = theirs.float().flatten(1).norm(dim=-1)
    if (nearest > SIMILAR * size).any():
        return None
    own = len(rows) == len(ours) and torch.equal(rows, torch.arange(len(rows), device=rows.device))
    return Rows(None if own else rows, float((nearest / size.clamp(min=torch.finfo(size.dtype).tiny)).max()))


def fitting(ours: Tensor, theirs: Tensor, told: Tensor) -> bool:
    """Whether rows of ours by number are those of theirs, to the bit."""
    return len(told) == len(theirs) and int(told.max()) < len(ours) and torch.equal(ours[told], theirs)
