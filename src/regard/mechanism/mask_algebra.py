"""Masks: which key a query may see, composed with &, | and ~. True means may see.

A mask has three methods. `sees` is the mask itself, for any queries and keys. `may` and `must` bound the visible keys of a
block of queries, so that keys hidden from the whole block are never read, and keys visible to all of it need no table.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError, TooLargeError
from regard.mechanism import spans
from regard.mechanism.arguments import check_count, describe_value
from regard.mechanism.spans import Spans, clamp_span

Offset = int | Tensor  # shared by the batch, or (b,)
LARGEST_TABLE = 2**32  # entries of a table
LARGEST_DRAWN_TABLE = 2**20  # entries of a table drawn in characters
KeyRanges = tuple[Tensor, Tensor]  # first and stop key of each query, (b or 1, q), int32, on the CPU


@dataclass(frozen=True)
class QueryBlock:
    """A block of queries, start to stop, and the smallest and largest offset of their positions among the keys."""

    start: int
    stop: int
    min_offset: int = 0
    max_offset: int = 0

    @property
    def first_position(self) -> int:
        """The lowest position of a query in the block."""
        return self.start + self.min_offset

    @property
    def last_position(self) -> int:
        """The highest position of a query in the block."""
        return self.stop - 1 + self.max_offset


def clamp_key_ranges(first: Tensor, stop: Tensor, k: int) -> KeyRanges:
    """Clamp the first and stop keys of each query, (q,) or (b, q), to 0 ... k and return them as Stretches."""
    lows, highs = (torch.atleast_2d(x.clamp(0, k).int()).contiguous() for x in (first, stop))
    return lows, highs


class Mask(ABC):
    """Base class of all masks. `a & b` sees what both see, `a | b` what either sees, `~a` what a hides."""

    @property
    def is_query_dependent(self) -> bool:
        """Whether two queries of one sequence may see different keys."""
        return True

    @abstractmethod
    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        """Return whether query i of batch row b and head h may see key j; the four indices broadcast."""

    @abstractmethod
    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        """Return ranges outside which no query of these rows, in any batch row or head, sees a key."""

    @abstractmethod
    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        """Return ranges of keys that every query of these rows, in every batch row and head, sees."""

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        """Return the one contiguous range of keys of each query; None if a query may see several, or heads differ."""
        return None

    @property
    def batch(self) -> int:
        """The number of batch rows with masks of their own; 1 if all share one."""
        return 1

    @property
    def heads(self) -> int:
        """The number of heads with masks of their own; 1 if all share one."""
        return 1

    def check(self, q: int, k: int, offset: Offset = 0) -> None:
        """Raise ShapeError if the mask was made for another number of queries or keys; most masks fit any."""
        return

    def table(self, q: int, k: int, offset: Offset = 0) -> Tensor:
        """Return the mask as a bool table, True = may see.

        Shape: (q, k); (h, q, k) or (b, h, q, k) where it differs between heads or batch rows.
        """
        check_table_size(q, k, LARGEST_TABLE)
        self.check(q, k, offset)
        device = offset.device if isinstance(offset, Tensor) else torch.device("cpu")
        table = self.block(torch.arange(q, device=device), torch.arange(k, device=device), offset)
        while table.dim() > 2 and table.shape[0] == 1:
            table = table[0]
        return table.expand(*table.shape[:-2], q, k)

    def block(self, queries: Tensor, keys: Tensor, offset: Offset = 0) -> Tensor:
        """Return the table of queries (n,) and keys (m,), given by index: four axes, broadcastable to (b, h, n, m)."""
        batch = broadcast_size("batch rows", self.batch, len(offset) if isinstance(offset, Tensor) and offset.dim() else 1)
        b = torch.arange(batch, device=queries.device).view(-1, 1, 1, 1)
        h = torch.arange(self.heads, device=queries.device).view(-1, 1, 1)
        table = self.can_see(b, h, queries.unsqueeze(-1), keys, offset)
        return table[(None,) * (4 - table.dim())]

    def draw(self, q: int, k: int, offset: Offset = 0) -> str:
        """Draw the table in characters, a line per query: ■ may see, · may not. Of a batch, the first."""
        check_table_size(q, k, LARGEST_DRAWN_TABLE)
        table = self.table(q, k, offset).reshape(-1, q, k)[0]
        return "\n".join(" ".join("■" if seen else "·" for seen in row) for row in table.tolist())

    def __and__(self, other: "Mask") -> "Mask":
        check_mask(other)
        if isinstance(self, Everything):
            return other
        return self if isinstance(other, Everything) or self == other else And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        check_mask(other)
        if isinstance(other, Everything):
            return other
        return self if isinstance(self, Everything) or self == other else Or(self, other)

    def __invert__(self) -> "Mask":
        return Not(self)


@dataclass(frozen=True)
class Everything(Mask):
    """Every query sees every key."""

    @property
    def is_query_dependent(self) -> bool:
        return False

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        return clamp_key_ranges(torch.zeros(q), torch.full((q,), k), k)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        return torch.ones_like(j, dtype=torch.bool)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return clamp_span(0, keys, keys)

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return clamp_span(0, keys, keys)


@dataclass(frozen=True)
class CombinedMask(Mask):
    """Two masks combined."""

    one: Mask
    other: Mask

    @property
    def is_query_dependent(self) -> bool:
        return self.one.is_query_dependent or self.other.is_query_dependent

    @property
    def batch(self) -> int:
        return broadcast_size("batch rows", self.one.batch, self.other.batch)

    @property
    def heads(self) -> int:
        return broadcast_size("heads", self.one.heads, self.other.heads)

    def check(self, q: int, k: int, offset: Offset = 0) -> None:
        self.one.check(q, k, offset)
        self.other.check(q, k, offset)


@dataclass(frozen=True)
class And(CombinedMask):
    """A query sees a key that both masks let it see."""

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        one, other = self.one.find_key_ranges(q, k, offset), self.other.find_key_ranges(q, k, offset)
        return None if one is None or other is None else (torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1]))

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        return self.one.can_see(b, h, i, j, offset) & self.other.can_see(b, h, i, j, offset)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.intersection(self.one.find_possible_keys(rows, keys), self.other.find_possible_keys(rows, keys))

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.intersection(self.one.find_certain_keys(rows, keys), self.other.find_certain_keys(rows, keys))

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else f"{part}" for part in (self.one, self.other))


@dataclass(frozen=True)
class Or(CombinedMask):
    """A query sees a key that either mask lets it see."""

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        one, other = self.one.find_key_ranges(q, k, offset), self.other.find_key_ranges(q, k, offset)
        if one is None or other is None or not torch.equal(*torch.broadcast_tensors(one[0], other[0])):
            return None
        return torch.broadcast_tensors(one[0], other[0])[0].contiguous(), torch.maximum(one[1], other[1])

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        return self.one.can_see(b, h, i, j, offset) | self.other.can_see(b, h, i, j, offset)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.union(self.one.find_possible_keys(rows, keys), self.other.find_possible_keys(rows, keys))

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.union(self.one.find_certain_keys(rows, keys), self.other.find_certain_keys(rows, keys))

    def __repr__(self) -> str:
        return f"{self.one} | {self.other}"


@dataclass(frozen=True)
class Not(Mask):
    """A query sees the keys that the mask hides."""

    mask: Mask

    @property
    def is_query_dependent(self) -> bool:
        return self.mask.is_query_dependent

    @property
    def batch(self) -> int:
        return self.mask.batch

    @property
    def heads(self) -> int:
        return self.mask.heads

    def check(self, q: int, k: int, offset: Offset = 0) -> None:
        self.mask.check(q, k, offset)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        return ~self.mask.can_see(b, h, i, j, offset)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.complement(self.mask.find_certain_keys(rows, keys), keys)

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.complement(self.mask.find_possible_keys(rows, keys), keys)

    def __invert__(self) -> Mask:
        return self.mask

    def __repr__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, CombinedMask) else f"~{self.mask}"


EVERYTHING = Everything()


def query_position(b: Tensor, i: Tensor, offset: Offset) -> Tensor:
    """Return the position of query i of batch row b among the keys."""
    if isinstance(offset, Tensor) and offset.dim():
        return i + offset[broadcast_index(b, len(offset))]
    return i + offset


def broadcast_index(index: Tensor, size: int) -> Tensor:
    """Return the index along an axis of this size, with zeros in its place for a broadcast axis of size 1."""
    return torch.zeros_like(index) if size == 1 else index


def broadcast_size(what: str, a: int, b: int) -> int:
    """Return the size that two sizes broadcast to, or raise ShapeError."""
    if a != b and 1 not in (a, b):
        raise ShapeError(f"two rules of one mask are for {a} and for {b} {what}.")
    return b if a == 1 else a  # an axis of 1 also broadcasts to 0


def check_table_size(q: int, k: int, most: int) -> None:
    """Raise ConfigError if q or k is not a number of tokens, TooLargeError if the table has more than `most` entries."""
    check_count("q", q, 0)
    check_count("k", k, 0)
    if q * k > most:
        raise TooLargeError(
            f"the table of {q:,} queries and {k:,} keys has {q * k:,} entries, and the most is {most:,}. "
            "Ask for fewer queries with block(queries, keys)."
        )


def check_mask(mask: object) -> Mask:
    """Return the mask, or raise ConfigError that says what to write instead."""
    if isinstance(mask, Mask):
        return mask
    came, instead = describe_value(mask), "A bool tensor goes in Given(tensor)."
    if isinstance(mask, Tensor) and mask.is_floating_point():
        came, instead = "a floating tensor", "One that is added to the scores goes in bias=."
    elif isinstance(mask, type):
        came, instead = f"the class {mask.__name__}", f"Write {mask.__name__}() with its brackets."
    elif mask is None:
        instead = "Everything() hides nothing."
    raise ConfigError(f"a mask is a rule such as Causal(), got {came}. {instead}")
