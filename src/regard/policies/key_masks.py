"""The masks of policies: the life of each key in a cache, pages of keys for each query, and columns and diagonals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.mechanism import spans
from regard.mechanism.mask_algebra import Mask, Offset, QueryBlock, broadcast_index, query_position
from regard.mechanism.spans import Spans, clamp_span


class HeadMask(Mask):
    """Base class of masks by batch row and head: dataclasses whose first field is a tensor (b or 1, h or 1, ...)."""

    is_batch_specific = True

    @property
    def batch(self) -> int:
        return self._get_sizes()[0]

    @property
    def heads(self) -> int:
        return self._get_sizes()[1]

    def _get_sizes(self) -> torch.Size:
        first, *_ = vars(self).values()
        size: torch.Size = first.shape
        return size


@dataclass(frozen=True, eq=False)
class Lifetime(HeadMask):
    """A query sees the keys that are not evicted before its position: ends (b or 1, h or 1, k), of each key.

    The end is the first position that does not see the key. That is all that eviction from a cache can do: a key does not come
    back. Together with the causal mask it is the cache of every moment, in one number for each key.
    """

    ends: Tensor

    @property
    def key_count(self) -> int:
        return self.ends.shape[2]

    def truncate(self, queries: int | None = None, keys: int | None = None) -> Mask:
        return Lifetime(self.ends[..., :keys])

    def select_heads(self, heads: Sequence[int] | slice) -> Mask:
        return Lifetime(self.ends[:, heads]) if self.heads > 1 else self

    def check(self, q: int, k: int, offset: Offset = 0) -> None:
        if self.ends.shape[2] != k:
            raise ShapeError(f"Lifetime has the ends of {self.ends.shape[2]} keys, but there are {k}.")

    def find_key_ends(self, k: int) -> Tensor | None:
        return self.ends

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        ends = self.ends.to(j.device)[broadcast_index(b, self.batch), broadcast_index(h, self.heads), j]
        return query_position(b, i, offset) < ends

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.find_true_spans((self.ends > rows.first_position).flatten(0, 1).any(0))

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return spans.find_true_spans((self.ends > rows.last_position).flatten(0, 1).all(0))

    def __repr__(self) -> str:
        return f"Lifetime(ends {tuple(self.ends.shape)})"


@dataclass(frozen=True, eq=False)
class ChosenPages(HeadMask):
    """A query sees the pages of keys that were chosen for it: pages (b or 1, h or 1, lines, n), by number.

    Line n is of the `rows` queries from position start + n rows on, page m holds the keys m page to (m + 1) page. Queries
    before `start`, and from `stop` on, see every key.
    """

    pages: Tensor
    page: int
    rows: int
    start: int
    stop: int

    def find_choosing_rows(self, tokens: int) -> slice:
        """Return the queries, among some tokens, that read only the keys chosen for them."""
        return slice(self.start, min(self.stop, tokens))

    def select_heads(self, heads: Sequence[int] | slice) -> Mask:
        return replace(self, pages=self.pages[:, heads]) if self.heads > 1 else self

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        b, h, p = torch.broadcast_tensors(b, h, query_position(b, i, offset))
        line = (p - self.start).div(self.rows, rounding_mode="floor")
        places, own = self.number_lines(b, h, line.clamp(0, self.pages.shape[2] - 1)).unique(return_inverse=True)
        chosen = self.pages.to(j.device).flatten(0, 2)[places].long()  # (places, n)
        width = max(int(chosen.max()), int(j.max()) // self.page) + 1 if j.numel() else 1
        table = torch.zeros(len(places), width, dtype=torch.bool, device=j.device).scatter_(1, chosen, True)
        is_outside: Tensor = (p < self.start) | (p >= self.stop)
        return is_outside | table[own, j // self.page]

    def number_lines(self, b: Tensor, h: Tensor, line: Tensor) -> Tensor:
        """Return the place of lines among those of all batch rows and heads, in the order of `pages`."""
        rows = broadcast_index(b, self.batch) * self.heads + broadcast_index(h, self.heads)
        place: Tensor = rows * self.pages.shape[2] + line
        return place

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        if rows.first_position < self.start or rows.last_position >= self.stop:
            return clamp_span(0, keys, keys)
        lines = slice((rows.first_position - self.start) // self.rows, (rows.last_position - self.start) // self.rows + 1)
        seen = torch.zeros(-(-keys // self.page) + 1, dtype=torch.bool)
        seen[self.pages[:, :, lines].flatten().clamp(max=len(seen) - 1).long().cpu()] = True
        pages = spans.find_true_spans(seen[:-1])
        return spans.intersection(tuple((a * self.page, z * self.page) for a, z in pages), clamp_span(0, keys, keys))

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        sees_all = rows.last_position < self.start or rows.first_position >= self.stop
        return clamp_span(0, keys, keys) if sees_all else ()

    def __repr__(self) -> str:
        return f"ChosenPages(pages {tuple(self.pages.shape)} of {self.page} keys)"


@dataclass(frozen=True, eq=False)
class Lines(HeadMask):
    """A query sees some columns and some diagonals: columns and distances are bool (b or 1, h or 1, t), by key and by distance.

    Queries from `stop` on see every key.
    """

    columns: Tensor
    distances: Tensor
    stop: int

    def find_choosing_rows(self, tokens: int) -> slice:
        """Return the queries, among some tokens, that read only the keys chosen for them."""
        return slice(0, min(self.stop, tokens))

    @property
    def key_count(self) -> int:
        return self.columns.shape[2]

    def select_heads(self, heads: Sequence[int] | slice) -> Mask:
        chosen = replace(self, columns=self.columns[:, heads], distances=self.distances[:, heads])
        return chosen if self.heads > 1 else self

    def can_see(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, offset: Offset = 0) -> Tensor:
        b, h, p = broadcast_index(b, self.batch), broadcast_index(h, self.heads), query_position(b, i, offset)
        back = p - j
        near = self.distances.to(j.device)[b, h, back.clamp(0, self.key_count - 1)] & (back >= 0)
        return self.columns.to(j.device)[b, h, j] | near | (p >= self.stop)

    def find_possible_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return clamp_span(0, keys, keys)

    def find_certain_keys(self, rows: QueryBlock, keys: int) -> Spans:
        return clamp_span(0, keys, keys) if rows.first_position >= self.stop else ()

    def __repr__(self) -> str:
        return f"Lines(columns {tuple(self.columns.shape)})"
