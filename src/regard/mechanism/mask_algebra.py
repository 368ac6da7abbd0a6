"""Masks: which key a query may see, composed with &, | and ~. True means may see.

A mask has three methods. `can_see` is the mask itself, for any queries and keys. `find_possible_keys` and `find_certain_keys`
bound the visible keys of a block of queries, so that keys hidden from the whole block are never read, and keys visible to all
of it need no table. All else has a default, which a mask overrides where it can say more.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

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
NEVER = 2**62  # the end of a key that every later query sees


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
    """Clamp the first and stop keys of each query, (q,) or (b, q), to 0 ... k and return them as KeyRanges."""
    lows, highs = (torch.atleast_2d(x.clamp(0, k).int()).contiguous() for x in (first, stop))
    return lows, highs


def find_key_ranges(mask: "Mask", q: int, k: int, offset: int | Sequence[int]) -> KeyRanges | None:
    """Return the one range of keys of each query, where batch rows may have offsets of their own; None as the method does."""
    if isinstance(offset, int):
        return mask.find_key_ranges(q, k, offset)
    by_offset = {start: mask.find_key_ranges(q, k, start) for start in set(offset)}
    found = [by_offset[start] for start in offset]
    if not found or any(ranges is None for ranges in found):
        return None
    own = [[x[b if len(x) > 1 else 0] for x in ranges] for b, ranges in enumerate(found) if ranges is not None]
    low, high = (torch.stack(x) for x in zip(*own, strict=True))
    return low, high


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

    def find_key_ends(self, k: int) -> Tensor | None:
        """Return the position from which a causal query does not see each key, (b or 1, h or 1, k); None if there is none.

        With these ends a query at position p sees the key j, where j is at most p, exactly if p is before the end of j.
        """
        return None

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The masks that this one is composed of; none if it is elementary."""
        return ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments that make an equal mask: numbers, tuples of numbers, tensors, masks or None."""
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]  # every mask is a dataclass

    @classmethod
    def from_arguments(cls, *arguments: Any) -> "Mask":
        """Make a mask from the arguments that a file states; raises what the constructor raises if they do not fit."""
        return cls(*arguments)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the mask and its parts hold."""
        own = tuple(value for value in vars(self).values() if isinstance(value, Tensor))
        return own + tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def is_relative(self) -> bool:
        """Whether visibility depends only on the distance of key and query."""
        return bool(self.parts) and all(part.is_relative for part in self.parts)

    @property
    def is_batch_specific(self) -> bool:
        """Whether the mask fits one batch only: its padding, its documents, its table."""
        return any(part.is_batch_specific for part in self.parts)

    @property
    def key_count(self) -> int | None:
        """The only number of keys that the mask fits; None if it fits any."""
        return next((part.key_count for part in self.parts if part.key_count is not None), None)

    @property
    def padding(self) -> "Mask | None":
        """The padding that the mask requires along with everything else; None if it requires none."""
        return None

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """The numbers of real keys wherever padding is part of the mask."""
        return tuple(length for part in self.parts for length in part.padded_lengths)

    @property
    def bounds(self) -> tuple[int, ...]:
        """The distances and positions, in tokens, at which visibility changes."""
        return tuple(bound for part in self.parts for bound in part.bounds)

    @property
    def similar(self) -> tuple["Mask", ...]:
        """Masks that are easily written by mistake instead of this elementary one."""
        return ()

    @property
    def condition(self) -> str:
        """The mask as a condition on the positions i of a query and j of a key, as in code."""
        return str(self)

    def transform_parts(self, change: Callable[["Mask"], "Mask"]) -> "Mask":
        """Return the mask with `change` applied to each of its parts; an elementary mask is returned as it is."""
        return self

    def truncate(self, queries: int | None = None, keys: int | None = None) -> "Mask":
        """Return the mask of the first queries and keys, None for all; every query has its position among these keys."""
        return self.transform_parts(lambda part: part.truncate(queries, keys))

    def for_keys(self, k: int) -> "Mask":
        """Return the mask for k keys, in which no part depends on their number."""
        return self.transform_parts(lambda part: part.for_keys(k))

    def select_heads(self, heads: Sequence[int] | slice) -> "Mask":
        """Return the mask of some heads."""
        return self.transform_parts(lambda part: part.select_heads(heads))

    def remove_padding(self) -> "Mask | None":
        """Return the mask without its `padding`; None if nothing else remains."""
        return self

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
        table = self.for_keys(k).block(torch.arange(q, device=device), torch.arange(k, device=device), offset)
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
        table = self.table(q, k, offset)
        while table.dim() > 2:
            table = table[0]
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

    is_query_dependent = False
    is_relative = True

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        return clamp_key_ranges(torch.zeros(q, device="cpu"), torch.full((q,), k, device="cpu"), k)

    def find_key_ends(self, k: int) -> Tensor | None:
        return torch.full((1, 1, k), NEVER)

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
    def parts(self) -> tuple[Mask, ...]:
        return self.one, self.other

    @classmethod
    def from_arguments(cls, *arguments: Any) -> Mask:
        return cls(*(check_mask(part) for part in arguments))

    def transform_parts(self, change: Callable[[Mask], Mask]) -> Mask:
        one, other = change(self.one), change(self.other)
        return self if one is self.one and other is self.other else type(self)(one, other)

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

    def find_key_ends(self, k: int) -> Tensor | None:
        one, other = self.one.find_key_ends(k), self.other.find_key_ends(k)
        return None if one is None or other is None else torch.minimum(one, other)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        return self.one.can_see(b, h, i, j, offset) & self.other.can_see(b, h, i, j, offset)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.intersection(self.one.find_possible_keys(rows, keys), self.other.find_possible_keys(rows, keys))

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.intersection(self.one.find_certain_keys(rows, keys), self.other.find_certain_keys(rows, keys))

    @property
    def padding(self) -> Mask | None:
        return self.one.padding or self.other.padding

    def remove_padding(self) -> Mask | None:
        one, other = self.one.remove_padding(), self.other.remove_padding()
        return other if one is None else one if other is None else one & other

    @property
    def condition(self) -> str:
        return f"{self.one.condition} & {self.other.condition}"

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

    def find_key_ends(self, k: int) -> Tensor | None:
        one, other = self.one.find_key_ends(k), self.other.find_key_ends(k)
        return None if one is None or other is None else torch.maximum(one, other)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        return self.one.can_see(b, h, i, j, offset) | self.other.can_see(b, h, i, j, offset)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.union(self.one.find_possible_keys(rows, keys), self.other.find_possible_keys(rows, keys))

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.union(self.one.find_certain_keys(rows, keys), self.other.find_certain_keys(rows, keys))

    @property
    def condition(self) -> str:
        return f"{self.one.condition} | {self.other.condition}"

    def __repr__(self) -> str:
        return f"{self.one} | {self.other}"


@dataclass(frozen=True)
class Not(Mask):
    """A query sees the keys that the mask hides."""

    mask: Mask

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.mask,)

    @classmethod
    def from_arguments(cls, *arguments: Any) -> Mask:
        return cls(*(check_mask(part) for part in arguments))

    def transform_parts(self, change: Callable[[Mask], Mask]) -> Mask:
        return ~change(self.mask)

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        hidden = self.mask.find_key_ranges(q, k, offset)
        if hidden is None:
            return None
        first, stop = hidden
        hides_first, hides_none = first <= 0, first >= stop
        if not bool((hides_first | hides_none | (stop >= k)).all()):
            return None  # keys on both sides of those that are hidden
        low, high = torch.where(hides_first, stop, 0), torch.where(hides_first, k, first)
        return torch.where(hides_none, 0, low), torch.where(hides_none, k, high)

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
        raise ShapeError(f"two parts of a mask are for {a} and for {b} {what}: use the same number, or 1.")
    return b if a == 1 else a  # an axis of 1 also broadcasts to 0


def check_table_size(q: int, k: int, most: int) -> None:
    """Raise ConfigError if q or k is not a number of tokens, TooLargeError if the table has more than `most` entries."""
    check_count("q", q, 0)
    check_count("k", k, 0)
    if q * k > most:
        raise TooLargeError(
            f"the table of {q:,} queries and {k:,} keys has {q * k:,} entries, but the limit is {most:,}. "
            "Ask for fewer queries with block(queries, keys)."
        )


def check_mask(mask: object) -> Mask:
    """Return the mask, or raise ConfigError that says what to write instead."""
    if isinstance(mask, Mask):
        return mask
    came, instead = describe_value(mask), "Pass a bool tensor as Given(tensor)."
    if isinstance(mask, Tensor) and mask.is_floating_point():
        came, instead = "a floating tensor", "Pass values that are added to the scores as bias=."
    elif isinstance(mask, type):
        came, instead = f"the class {mask.__name__}", f"Write {mask.__name__}() with parentheses."
    elif mask is None:
        instead = "Use Everything() to hide nothing."
    elif isinstance(mask, (str, int, float)):
        instead = "Combine rules with & and |, as in Causal() & Window(128)."
    raise ConfigError(f"a mask must be a Mask such as Causal(), got {came}. {instead}")
