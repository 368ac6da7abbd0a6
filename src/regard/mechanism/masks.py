"""The masks: causal, window, prefix, padding, documents, or a given table. `mask_algebra.py` composes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.mechanism import spans
from regard.mechanism.arguments import check_choice, check_count, describe_value
from regard.mechanism.mask_algebra import (
    EVERYTHING,
    NEVER,
    And,
    Everything,
    KeyRanges,
    Mask,
    Not,
    Offset,
    Or,
    QueryBlock,
    broadcast_index,
    broadcast_size,
    clamp_key_ranges,
    query_position,
)
from regard.mechanism.spans import Spans, clamp_span

__all__ = ["EVERYTHING", "Causal", "Documents", "Everything", "Given", "Mask", "Padding", "Prefix", "Window"]


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys up to its own position."""

    is_relative = True
    condition = "(j <= i)"

    @property
    def similar(self) -> tuple[Mask, ...]:
        return (Window(right=1),)

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        return clamp_key_ranges(torch.zeros(q, device="cpu"), torch.arange(q, device="cpu") + offset + 1, k)

    def find_key_ends(self, k: int) -> Tensor | None:
        return torch.full((1, 1, k), NEVER)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        return j <= query_position(b, i, offset)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return clamp_span(0, rows.last_position + 1, keys)

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return clamp_span(0, rows.first_position + 1, keys)


@dataclass(frozen=True)
class Window(Mask):
    """A query sees `left` keys before its own position, its own, and `right` keys after it; None means no bound."""

    is_relative = True

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, bound in (("left", self.left), ("right", self.right)):
            if bound is not None:
                object.__setattr__(self, name, check_key_count(f"Window({name})", bound, " or None for no bound"))

    @property
    def bounds(self) -> tuple[int, ...]:
        return tuple(bound for bound in (self.left, self.right) if bound is not None)

    @property
    def similar(self) -> tuple[Mask, ...]:
        sides = (("left", self.left), ("right", self.right))
        return tuple(replace(self, **{side: other}) for side, bound in sides for other in list_missed_bounds(bound))

    @property
    def condition(self) -> str:
        left = [] if self.left is None else [f"(i - j <= {self.left})"]
        right = [] if self.right is None else [f"(j - i <= {self.right})"]
        return " & ".join([*left, *right]) or "everything"

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        p = torch.arange(q, device="cpu") + offset
        first = torch.zeros_like(p) if self.left is None else p - self.left
        return clamp_key_ranges(first, torch.full_like(p, k) if self.right is None else p + self.right + 1, k)

    def find_key_ends(self, k: int) -> Tensor | None:
        keys = torch.arange(k).view(1, 1, k)
        return torch.full_like(keys, NEVER) if self.left is None else keys + self.left + 1

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        ahead = j - query_position(b, i, offset)
        near = torch.ones_like(ahead, dtype=torch.bool) if self.left is None else ahead >= -self.left
        return near if self.right is None else near & (ahead <= self.right)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        start = 0 if self.left is None else rows.first_position - self.left
        return clamp_span(start, keys if self.right is None else rows.last_position + self.right + 1, keys)

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        start = 0 if self.left is None else rows.last_position - self.left
        return clamp_span(start, keys if self.right is None else rows.first_position + self.right + 1, keys)


@dataclass(frozen=True)
class Prefix(Mask):
    """A query sees the first n keys. `Causal() | Prefix(n)` makes a prompt of n tokens fully visible to itself."""

    is_query_dependent = False

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", check_key_count("Prefix(n)", self.n))

    @property
    def bounds(self) -> tuple[int, ...]:
        return (self.n,)

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        return clamp_key_ranges(torch.zeros(q, device="cpu"), torch.full((q,), self.n, device="cpu"), k)

    def find_key_ends(self, k: int) -> Tensor | None:
        return torch.where(torch.arange(k).view(1, 1, k) < self.n, NEVER, 0)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        return j < self.n

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return clamp_span(0, self.n, keys)

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return clamp_span(0, self.n, keys)


class MaskOfTensors(Mask):
    """Base class of masks whose arguments may be tensors: equal ones have equal arguments, with tensors on one device."""

    is_batch_specific = True

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = list(zip(self.arguments, other.arguments, strict=False))
        return len(self.arguments) == len(other.arguments) and all(
            isinstance(x, Tensor) and isinstance(y, Tensor) and x.device == y.device and torch.equal(x, y)
            if isinstance(x, Tensor) or isinstance(y, Tensor)
            else x == y
            for x, y in pairs
        )

    def __hash__(self) -> int:
        return hash(tuple(x.shape if isinstance(x, Tensor) else x for x in self.arguments))


@dataclass(frozen=True, eq=False)
class Padding(MaskOfTensors):
    """A query sees the real keys of its batch row: the first lengths[b], with side="left" the last, or True in a table (b, t).

    The last keys depend on how many there are: `for_keys` gives the rule for a number of keys, which hides the same first ones
    where further keys follow.
    """

    is_query_dependent = False
    is_batch_specific = True

    lengths: tuple[int, ...]
    side: str
    real: Tensor | None

    def __init__(self, lengths: Sequence[int] | Tensor, side: str = "right") -> None:
        is_table = isinstance(lengths, Tensor) and lengths.dtype == torch.bool and lengths.layout is torch.strided
        real = lengths.detach().clone() if isinstance(lengths, Tensor) and is_table and lengths.dim() == 2 else None
        numbers = lengths if real is None else real.sum(1)
        hides_numbers = isinstance(numbers, Tensor) and (
            numbers.layout is not torch.strided or numbers.is_meta or numbers.is_quantized
        )
        counts = numbers.tolist() if hasattr(numbers, "tolist") and not hides_numbers else numbers
        if not isinstance(counts, Sequence) or isinstance(counts, bytes) or any(isinstance(each, Sequence) for each in counts):
            raise ShapeError(
                "Padding takes whole numbers (b,), the lengths of the batch rows, or a bool tensor (b, t), True for real keys; "
                f"got {describe_value(lengths)}. Of an attention mask of 0 and 1: Padding(mask.bool())."
            )
        object.__setattr__(self, "lengths", tuple(check_key_count("Padding(lengths)", each) for each in counts))
        object.__setattr__(self, "side", check_choice("Padding(side)", side, ("right", "left")))
        object.__setattr__(self, "real", real)

    @property
    def arguments(self) -> tuple[Any, ...]:
        plain = (self.lengths,) if self.side == "right" else (self.lengths, self.side)
        return plain if self.real is None else (self.real,)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def padding(self) -> Mask:
        return self

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        return self.lengths

    @property
    def key_count(self) -> int | None:
        return None if self.real is None else self.real.shape[1]

    def check(self, q: int, k: int, offset: Offset = 0) -> None:
        if self.key_count not in (None, k):
            raise ShapeError(f"Padding(table) is for {self.key_count} keys, but there are {k}.")

    def remove_padding(self) -> None:
        return None

    def for_keys(self, k: int) -> Mask:
        if self.real is not None:
            return Given.from_shared_table(self.real[:, None, None])
        return self if self.side == "right" else ~Padding([max(k - length, 0) for length in self.lengths])

    def truncate(self, queries: int | None = None, keys: int | None = None) -> Mask:
        if keys is None:
            return self
        require_known_end(self)
        return self if self.real is None else Padding(self.real[:, :keys])

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        if self.for_keys(k) is not self:
            return self.for_keys(k).find_key_ranges(q, k, offset)
        stop = torch.tensor(self.lengths, device="cpu").view(-1, 1).expand(-1, q)
        return clamp_key_ranges(torch.zeros_like(stop), stop, k)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        require_known_end(self)
        row = broadcast_index(b, self.batch)
        if self.real is not None:
            return self.real.to(j.device)[row, j]
        return j < torch.tensor(self.lengths, device=j.device)[row]

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        if self.for_keys(keys) is not self:
            return self.for_keys(keys).find_possible_keys(rows, keys)
        return clamp_span(0, max(self.lengths, default=0), keys)

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        if self.for_keys(keys) is not self:
            return self.for_keys(keys).find_certain_keys(rows, keys)
        return clamp_span(0, min(self.lengths, default=0), keys)

    def __repr__(self) -> str:
        if self.real is not None:
            return f"Padding(table {tuple(self.real.shape)})"
        return f"Padding(lengths={self.lengths}{'' if self.side == 'right' else ', side=' + repr(self.side)})"


def require_known_end(padding: Padding) -> None:
    """Raise ConfigError for the last keys of an unknown number of keys."""
    if padding.real is None and padding.side == "left":
        raise ConfigError(f"{padding} depends on the number of keys: use mask.table(q, k), or mask.for_keys(k) in its place.")


@dataclass(frozen=True, eq=False)
class Documents(MaskOfTensors):
    """A query sees the keys with the same document id.

    Ids are (t,) or (b, t). One set of ids belongs to positions, and `offset` moves the queries along it; a query whose
    position lies outside has no document. Two sets are the ids of this call's queries and of its keys.
    """

    is_batch_specific = True

    queries: Tensor
    keys: Tensor
    has_shared_ids: bool

    def __init__(self, queries: Sequence[object] | Tensor, keys: Sequence[object] | Tensor | None = None) -> None:
        object.__setattr__(self, "queries", convert_ids(queries))
        object.__setattr__(self, "keys", self.queries if keys is None else convert_ids(keys).to(self.queries.device))
        object.__setattr__(self, "has_shared_ids", keys is None)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.queries, None if self.has_shared_ids else self.keys

    @property
    def batch(self) -> int:
        return broadcast_size("batch rows", len(self.queries), len(self.keys))

    @property
    def key_count(self) -> int:
        return self.keys.shape[-1]

    def truncate(self, queries: int | None = None, keys: int | None = None) -> Mask:
        if self.has_shared_ids:
            return self if keys is None else Documents(self.keys[..., :keys])
        return Documents(self.queries[..., :queries], self.keys[..., :keys])

    def check(self, q: int, k: int, offset: Offset = 0) -> None:
        if self.keys.shape[-1] != k:
            raise ShapeError(f"Documents has ids for {self.keys.shape[-1]} keys, but there are {k}.")
        if not self.has_shared_ids and self.queries.shape[-1] != q:
            raise ShapeError(f"Documents has ids for {self.queries.shape[-1]} queries, but there are {q}.")

    def find_key_ranges(self, q: int, k: int, offset: int) -> KeyRanges | None:
        if not self.has_shared_ids or offset < 0 or offset + q > self.keys.shape[-1] or self.keys.is_meta:
            return None
        ids, place = self.keys.cpu(), torch.arange(k, device="cpu")  # (b, k)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        run = begins.cumsum(1) - 1
        if any(len(row.unique()) <= int(runs[-1]) for row, runs in zip(ids, run, strict=True)):
            return None  # an id occurs in two separate ranges
        first = torch.where(begins, place, 0).cummax(1).values
        sizes = torch.zeros_like(run).scatter_add(1, run, torch.ones_like(run)).gather(1, run)
        rows = slice(offset, offset + q)
        return clamp_key_ranges(first[:, rows], (first + sizes)[:, rows], k)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        queries, keys = self.queries.to(j.device), self.keys.to(j.device)
        p = query_position(b, i, offset) if self.has_shared_ids else i
        inside = (p >= 0) & (p < queries.shape[-1])
        if not queries.shape[-1]:
            return inside & (j < 0)  # no ids to index
        is_equal = (
            queries[broadcast_index(b, len(queries)), p.clamp(0, queries.shape[-1] - 1)]
            == keys[broadcast_index(b, len(keys)), j]
        )
        return is_equal & inside

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        seen = torch.isin(self.keys, self.select_ids(rows).unique())
        return spans.find_true_spans(seen.any(0))

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        all_inside = not self.has_shared_ids or (rows.first_position >= 0 and rows.last_position < self.queries.shape[-1])
        found = self.select_ids(rows)
        one = found[:, :1]  # (b, 1)
        if not all_inside or not found.numel() or bool((found != one).any()):
            return ()
        return spans.find_true_spans((self.keys == one).all(0))

    def select_ids(self, rows: QueryBlock) -> Tensor:
        """Return the ids of these queries, (b, n)."""
        return (
            self.queries[:, max(rows.first_position, 0) : max(rows.last_position + 1, 0)]
            if self.has_shared_ids
            else self.queries[:, rows.start : rows.stop]
        )

    def __repr__(self) -> str:
        shapes = tuple(self.queries.shape) if self.has_shared_ids else (tuple(self.queries.shape), tuple(self.keys.shape))
        return f"Documents(ids {shapes})"


@dataclass(frozen=True, eq=False)
class Given(MaskOfTensors):
    """A mask given as a table: bool, broadcastable from the right to (b, h, q, k); its rows are this call's queries."""

    is_batch_specific = True

    given: Tensor

    def __init__(self, table: Tensor) -> None:
        is_dense = isinstance(table, Tensor) and table.layout is torch.strided and not table.is_nested
        if not is_dense or table.dtype != torch.bool or not 1 <= table.dim() <= 4:
            instead = "table.bool()" if isinstance(table, Tensor) else "torch.tensor(table)"
            raise ShapeError(
                "Given(table) takes a dense bool tensor of one to four axes, True = may see; "
                f"got {describe_value(table)}. Try {instead}."
            )
        object.__setattr__(self, "given", table.detach().clone()[(None,) * (4 - table.dim())])

    @classmethod
    def from_shared_table(cls, table: Tensor) -> "Given":
        """Make a mask of a table of four axes without a copy; nothing may change the table afterwards."""
        rule = cls.__new__(cls)
        object.__setattr__(rule, "given", table)
        return rule

    @classmethod
    def from_arguments(cls, *arguments: Any) -> "Given":
        (table,) = arguments
        if not isinstance(table, Tensor) or table.dtype != torch.bool or table.dim() != 4:
            raise ShapeError(f"Given takes a bool table of four axes from a file; got {describe_value(table)}.")
        return cls.from_shared_table(table)

    @property
    def is_query_dependent(self) -> bool:
        return self.given.shape[2] > 1

    @property
    def key_count(self) -> int | None:
        return self.given.shape[3] if self.given.shape[3] > 1 else None

    def truncate(self, queries: int | None = None, keys: int | None = None) -> Mask:
        q, k = self.given.shape[2:]
        return Given.from_shared_table(self.given[:, :, : queries if q > 1 else None, : keys if k > 1 else None])

    def find_key_ends(self, k: int) -> Tensor | None:
        is_shared = self.given.shape[2] == 1  # by all queries
        return torch.where(self.given[:, :, 0].expand(-1, -1, k), NEVER, 0) if is_shared else None

    def select_heads(self, heads: Sequence[int] | slice) -> Mask:
        return Given.from_shared_table(self.given[:, heads]) if self.heads > 1 else self

    @property
    def batch(self) -> int:
        return self.given.shape[0]

    @property
    def heads(self) -> int:
        return self.given.shape[1]

    def check(self, q: int, k: int, offset: Offset = 0) -> None:
        for axis, came, expected in zip("qk", self.given.shape[2:], (q, k), strict=True):
            if came not in (1, expected):
                raise ShapeError(
                    f"Given(table) is (b, h, q, k) = {tuple(self.given.shape)}: its {axis} is {came}, expected 1 or {expected}."
                )

    def block(self, queries: Tensor, keys: Tensor, offset: Offset = 0) -> Tensor:
        q, k = self.given.shape[2:]
        table = self.given if q == 1 else self.given[:, :, queries.to(self.given.device)]
        return (table if k == 1 else table[..., keys.to(table.device)]).to(queries.device)

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        batch, heads, queries, keys = self.given.shape
        return self.given.to(j.device)[
            broadcast_index(b, batch), broadcast_index(h, heads), broadcast_index(i, queries), broadcast_index(j, keys)
        ]

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.find_true_spans(self.select_rows(rows).flatten(0, 2).any(0).expand(keys))

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.find_true_spans(self.select_rows(rows).flatten(0, 2).all(0).expand(keys))

    def select_rows(self, rows: QueryBlock) -> Tensor:
        """Return the table of these queries, (b, h, n, k)."""
        return self.given if self.given.shape[2] == 1 else self.given[:, :, rows.start : rows.stop]

    def __repr__(self) -> str:
        return f"Given(table {tuple(self.given.shape)})"


def convert_ids(given: Sequence[object] | Tensor) -> Tensor:
    """Return a copy of document ids as (b, t), b = 1 if all rows share them, or raise ShapeError."""
    try:
        found = torch.as_tensor(given).detach().clone()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(f"Documents takes ids (t,) or (b, t), whole numbers in rows of equal length: {error}.") from None
    is_dense = found.layout is torch.strided and not (found.is_nested or found.is_complex() or found.is_quantized)
    if not is_dense or (found.is_floating_point() and found.isnan().any()):
        raise ShapeError(f"Documents takes ids (t,) or (b, t), whole numbers in a dense tensor; got {describe_value(given)}.")
    if found.dim() not in (1, 2):
        raise ShapeError(f"Documents takes ids (t,) or (b, t), got {tuple(found.shape)}.")
    return found if found.dim() == 2 else found.unsqueeze(0)


def list_missed_bounds(bound: int | None) -> list[int | None]:
    """Return the bounds that are one off, and None for one that is left out."""
    return [] if bound is None else [bound + 1, *([bound - 1] if bound else []), None]


def check_key_count(name: str, keys: object, alternative: str = "") -> int:
    """Return a number of keys, or raise ConfigError."""
    return check_count(f"{name} counts keys and", keys, 0, alternative=alternative)


CLASSES: dict[str, type[Mask]] = {  # by the names that files state
    one.__name__: one for one in (And, Causal, Documents, Everything, Given, Not, Or, Padding, Prefix, Window)
}
