"""StoredMatrix: weights that no short formula gives, kept as they are, and matrices joined from those of several calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.map.linear_recurrence import LinearRecurrence
from regard.map.scored_matrix import ScoredMatrix
from regard.mechanism.arguments import describe_value
from regard.mechanism.spans import Span


@dataclass(frozen=True, eq=False, kw_only=True)
class StoredMatrix:
    """M as it is: entries (b, h, q, k), and what kind of attention they are of."""

    entries: Tensor
    title: str = "weights without a softmax"

    def __post_init__(self) -> None:
        if not isinstance(self.entries, Tensor) or self.entries.dim() != 4 or not self.entries.is_floating_point():
            raise ShapeError(f"entries must be floating point numbers (b, h, q, k), got {describe_value(self.entries)}.")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        return {"entries": self.entries}

    @property
    def shape(self) -> tuple[int, int, int]:
        """The batch rows, heads and keys (b, h, t)."""
        b, h, _, t = self.entries.shape
        return b, h, t

    @property
    def rows(self) -> int:
        """The number of queries."""
        return self.entries.shape[2]

    def select_rows(self, rows: Tensor) -> "StoredMatrix":
        """Return the matrix of some batch rows, by index."""
        return replace(self, entries=self.entries[rows.to(self.entries.device)])

    def build_plane(self, b: int, h: int) -> "StoredPlane":
        """Return the matrix of one batch row and head."""
        return StoredPlane(self.entries[b, h])


@dataclass(frozen=True, eq=False)
class StoredPlane:
    """The matrix (q, k) of one batch row and head."""

    entries: Tensor

    def find_keys(self, first: int, last: int) -> Span:
        """Return the span of the keys that the queries first to last may see, both included."""
        return 0, self.entries.shape[1]

    def compute_rows(self, queries: Tensor, first: int, stop: int) -> Tensor:
        """Compute the entries (n, m) of queries (n,) by index on the keys first to stop, in float64."""
        return self.entries[queries, first:stop].double()


@dataclass(frozen=True, eq=False)
class JoinedMatrices:
    """Several matrices as one: the queries of one call after those of another, on more keys each time, or heads after heads."""

    parts: Sequence[StoredMatrix | ScoredMatrix | LinearRecurrence]
    axis: str = "queries"

    @property
    def title(self) -> str:
        """What kind of attention the weights are of."""
        return next(one.title for one in self.parts if not isinstance(one, LinearRecurrence))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of all parts, by number and name."""
        return {f"{n} {name}": x for n, part in enumerate(self.parts) for name, x in part.tensors.items()}

    @property
    def shape(self) -> tuple[int, int, int]:
        """The batch rows, heads and keys (b, h, t)."""
        b, h, t = self.parts[-1].shape
        return b, sum(part.shape[1] for part in self.parts) if self.axis == "heads" else h, t

    @property
    def rows(self) -> int:
        """The number of queries."""
        return self.parts[0].rows if self.axis == "heads" else sum(part.rows for part in self.parts)

    def build_plane(self, b: int, h: int) -> Any:
        """Return the matrix of one batch row and head."""
        if self.axis == "queries":
            return JoinedPlane([part.build_plane(b, h) for part in self.parts], [part.rows for part in self.parts])
        for part in self.parts:
            if h < part.shape[1]:
                return part.build_plane(b, h)
            h -= part.shape[1]
        raise IndexError(h)


@dataclass(frozen=True, eq=False)
class JoinedPlane:
    """The matrix (q, k) of one batch row and head of several calls, each with a number of queries; later keys have weight 0."""

    planes: Sequence[Any]
    lengths: Sequence[int]

    @cached_property
    def keys(self) -> int:
        """The number of keys of the last call."""
        return max(self.key_counts)

    @cached_property
    def key_counts(self) -> list[int]:
        """The number of keys of each call."""
        return [plane.find_keys(0, length - 1)[1] for plane, length in zip(self.planes, self.lengths, strict=True)]

    def find_keys(self, first: int, last: int) -> Span:
        """Return the span of the keys that the queries first to last may see, both included."""
        return 0, self.keys

    def compute_rows(self, queries: Tensor, first: int, stop: int) -> Tensor:
        """Compute the entries (n, m) of queries (n,) by index on the keys first to stop, in float64."""
        found = torch.zeros(len(queries), stop - first, dtype=torch.float64, device=queries.device)
        start = 0
        for plane, length, keys in zip(self.planes, self.lengths, self.key_counts, strict=True):
            inside = (queries >= start) & (queries < start + length)
            end = min(stop, keys)
            if inside.any() and end > first:
                found[inside, : end - first] = plane.compute_rows(queries[inside] - start, first, keys)[:, : end - first]
            start += length
        return found
