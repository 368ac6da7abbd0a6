"""Biases of relative positions: products of queries, or of keys, with a vector for each distance from query to key.

DeBERTa's content-to-position term is q_i · R[f(j - i)], and its position-to-content term is k_j · S[g(j - i)]; Transformer-XL,
XLNet and Shaw's attention have the first. The vectors of the tokens and the table of the distances are stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.map.computed_bias import ComputedBias, drop_repeated_axes
from regard.mechanism.request import disable_autocast
from regard.mechanism.scores import score_dtype

SMALLER = 4  # times as many keys as distances at which it is not 0 must a bias have
ROWS = 128  # tokens whose products with distances are computed at a time
PAIR_NUMBERS = 2**22  # numbers of vectors that are multiplied at a time where single entries are read
DENSE = 4  # times as many entries as are read may a block have that is computed for them


@dataclass(frozen=True, eq=False)
class DistanceTerm:
    """One term, vectors[i] · table[index[j - i + q - 1]] of query i and key j, with vectors[j] if the vectors are the keys'."""

    vectors: Tensor  # (..., q, d), or (..., k, d)
    table: Tensor  # (..., n, d)
    index: Tensor  # (q + k - 1,)
    is_of_keys: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (..., q, k) of the term."""
        own = self.vectors.shape[-2]
        other = len(self.index) + 1 - own
        return (*self.vectors.shape[:-2], *((other, own) if self.is_of_keys else (own, other)))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the entries, in which they are computed."""
        return score_dtype(self.vectors.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of the vectors, the table and the index, without repeats along axes that are expanded."""
        return sum(x.nbytes for x in self.list_tensors())

    def list_tensors(self) -> list[Tensor]:
        """Return the vectors, the table and the index, with size 1 for each axis along which they are expanded."""
        return [drop_repeated_axes(self.vectors), drop_repeated_axes(self.table), self.index]

    def bound(self) -> float:
        """Return a bound of the size of the entries."""
        longest = [torch.linalg.vector_norm(x, dim=-1, dtype=self.dtype).amax() for x in self.list_tensors()[:2]]
        return float(longest[0]) * float(longest[1])

    def apply(self, function: Callable[[Tensor], Tensor]) -> "DistanceTerm":
        """Return the term with a function of its vectors and its table, which may move it to another device."""
        vectors, table = function(self.vectors), function(self.table)
        return replace(self, vectors=vectors, table=table, index=self.index.to(vectors.device))

    def select(self, leading: tuple[Any, ...], rows: slice, columns: slice) -> "DistanceTerm":
        """Return the term of a span of queries, a span of keys, and what an index of the leading axes says."""
        queries = self.shape[-2]
        distances = slice(columns.start - rows.stop + queries, columns.stop - rows.start + queries - 1)
        own = columns if self.is_of_keys else rows
        table = self.table[leading] if leading else self.table
        return replace(self, vectors=self.vectors[(*leading, own)], table=table, index=self.index[distances])

    def compute(self) -> Tensor:
        """Compute the whole term."""
        queries, keys = self.shape[-2:]
        vectors, table = self.vectors.to(self.dtype), self.table.to(self.dtype)
        with disable_autocast(vectors.device):
            if self.is_of_keys:
                return multiply_distances(vectors, table, self.index.flip(0), queries).mT
            return multiply_distances(vectors, table, self.index, keys)

    def compute_pairs(self, leading: tuple[Any, ...], rows: Tensor, columns: Tensor) -> Tensor:
        """Compute the entries of single pairs (n,) of queries and keys, with an index of the leading axes."""
        vectors = self.vectors[(*leading, columns if self.is_of_keys else rows)]
        table = self.table[(*leading, self.index[columns - rows + self.shape[-2] - 1])]
        return (vectors.to(self.dtype) * table.to(self.dtype)).sum(-1)


class DistanceProducts(ComputedBias):
    """A bias (..., q, k), the sum of terms of relative positions and of another bias, `rest`, which broadcasts.

    Blocks of it are computed with the distances that occur in them alone. Its slices, rows, entries and heads are computed from
    the vectors; any other function of torch takes it as an ordinary tensor.
    """

    terms: tuple[DistanceTerm, ...]
    rest: Tensor | None

    @staticmethod
    def __new__(cls, terms: tuple[DistanceTerm, ...], rest: Tensor | None = None) -> "DistanceProducts":
        """Build the bias of terms, of which at least one is needed, and of another bias that is added."""
        shapes = [one.shape for one in terms] + ([] if rest is None else [rest.shape])
        shape = torch.broadcast_shapes(*shapes)
        terms = tuple(expand_term(one, shape) for one in terms)
        first = terms[0]
        found: DistanceProducts = Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.vectors.device)
        found.terms, found.rest = terms, None if rest is None else rest.expand(shape)
        return found

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the vectors, tables and indices, and of what is added."""
        rest = 0 if self.rest is None else drop_repeated_axes(self.rest).nbytes
        return sum(one.nbytes for one in self.terms) + rest

    def data_ptr(self) -> int:
        """Return the address of the index of the first term: that of its vectors may be the queries' or the keys'."""
        return self.terms[0].index.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the vectors of the first term."""
        return self.terms[0].vectors.untyped_storage()

    def bound(self) -> float:
        """Return a bound of the size of the terms."""
        return sum(one.bound() for one in self.terms)

    def apply(self, function: Callable[[Tensor], Tensor]) -> "DistanceProducts":
        """Return the bias with a function of its vectors, its tables and what is added."""
        terms = tuple(one.apply(function) for one in self.terms)
        return DistanceProducts(terms, None if self.rest is None else function(self.rest)).expand(self.shape)

    def with_rest(self, rest: Tensor | None) -> "DistanceProducts":
        """Return the bias with another one that is added to its terms."""
        return DistanceProducts(self.terms, rest)

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        """Return the whole bias."""
        terms = [one.compute() for one in self.terms]
        return add_up(terms if self.rest is None else [*terms, self.rest.to(self.dtype)])

    def expand(self, *sizes: Any, **_: Any) -> "DistanceProducts":
        """Return the bias expanded along axes before those of queries and keys."""
        shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        missing = len(shape) - self.dim()
        whole = [own if size == -1 else size for own, size in zip((1,) * missing + self.shape, shape, strict=True)]
        rest = None if self.rest is None else self.rest.expand(whole)
        return DistanceProducts(tuple(expand_term(one, (*whole[:-2], *self.shape[-2:])) for one in self.terms), rest)

    def select_spans(self, leading: tuple[Any, ...], rows: slice, columns: slice) -> Tensor:
        terms = tuple(one.select(leading, rows, columns) for one in self.terms)
        return DistanceProducts(terms, None if self.rest is None else self.rest[(*leading, rows, columns)])

    def read_entries(self, leading: tuple[Any, ...], rows: Tensor, columns: Tensor) -> Tensor | None:
        block = self.read_block(leading, rows, columns)
        return self.read_pairs(leading, rows, columns) if block is None else block

    def read_block(self, leading: tuple[Any, ...], rows: Tensor, columns: Tensor) -> Tensor | None:
        """Return all entries of some rows (n, 1) and columns (m,) of a block; None if they are spread too far for one."""
        is_grid = rows.dim() == 2 and rows.shape[1] == 1 and columns.dim() == 1 and rows.numel() and columns.numel()
        if not is_grid or any(isinstance(one, Tensor) for one in leading):
            return None
        (i, m), (j, n) = ((int(x.min()), int(x.max()) + 1) for x in (rows, columns))
        if (m - i) * (n - j) > DENSE * rows.numel() * columns.numel():
            return None
        block = self[(*leading, slice(i, m), slice(j, n))].to_dense()
        if (m - i, n - j) == (rows.numel(), columns.numel()):
            rows, columns = rows - i, columns - j
            ordered = [torch.arange(x.numel(), device=x.device) for x in (rows, columns)]
            if torch.equal(rows.flatten(), ordered[0]) and torch.equal(columns, ordered[1]):
                return block
            return block[..., rows, columns]
        return block[..., rows - i, columns - j]

    def read_pairs(self, leading: tuple[Any, ...], rows: Tensor, columns: Tensor) -> Tensor | None:
        """Return single entries, pair by pair; None if an index of the leading axes comes between spans of others."""
        kinds = [isinstance(one, Tensor) for one in leading if not isinstance(one, int)]
        if kinds != sorted(kinds):
            return None
        indices = torch.broadcast_tensors(rows, columns, *(one for one in leading if isinstance(one, Tensor)))
        shape, spans = indices[0].shape, [one for one in leading if isinstance(one, slice)]
        flat = [one.reshape(-1) for one in indices]
        matrices = self.shape[: len(leading)].numel() if spans else 1
        size = max(1, PAIR_NUMBERS // (matrices * max(one.vectors.shape[-1] for one in self.terms)))
        found = []
        for i, j, *others in zip(*(one.split(size) for one in flat), strict=True):
            numbers = iter(others)
            own = tuple(next(numbers) if isinstance(one, Tensor) else one for one in leading)
            terms = [one.compute_pairs(own, i, j) for one in self.terms]
            found.append(add_up(terms if self.rest is None else [*terms, self.rest[(*own, i, j)].to(self.dtype)]))
        entries = torch.cat(found, -1)
        return entries.view(*entries.shape[:-1], *shape)


def find_band(bias: Tensor) -> DistanceProducts | None:
    """Return a bias (..., q, k) that is 0 but at a few distances by its entries at these; None if it is another one.

    So are the relative positions of VITS, of keys in a window. The vectors are the entries, and the table picks them.
    """
    queries, keys = bias.shape[-2:]
    if score_dtype(bias.dtype) != bias.dtype or not bias.numel() or bias[..., 0, -1].any() or bias[..., -1, 0].any():
        return None
    if queries < SMALLER or SMALLER * int(bias[..., queries // 2, :].count_nonzero()) > keys * bias[..., 0, 0].numel():
        return None
    rows, columns = bias.reshape(-1, queries, keys).ne(0).any(0).nonzero(as_tuple=True)
    first, last = (int(one) for one in (columns - rows).aminmax()) if len(rows) else (0, 0)
    width = last - first + 1
    if SMALLER * width > keys:
        return None
    places = torch.arange(queries, device=bias.device).unsqueeze(-1) + torch.arange(first, last + 1, device=bias.device)
    entries = bias.gather(-1, places.clamp(0, keys - 1).expand(*bias.shape[:-1], width))
    entries = entries.masked_fill((places < 0) | (places >= keys), 0)
    if not bool(entries.isfinite().all()):
        return None
    table = torch.eye(width + 1, width, dtype=bias.dtype, device=bias.device)  # whose last row is 0
    index = torch.arange(queries + keys - 1, device=bias.device) - (queries - 1) - first
    index = index.where((index >= 0) & (index < width), width)
    return DistanceProducts((DistanceTerm(entries, table.expand(*bias.shape[:-2], -1, -1), index),))


def find_buckets(bias: Tensor) -> DistanceProducts | None:
    """Return a bias (..., q, k) of which each query has one number for each of a few spans of distances; None for another one.

    So are the relative positions of ProphetNet. The vectors are the numbers, and the table picks them.
    """
    queries, keys = bias.shape[-2:]
    if score_dtype(bias.dtype) != bias.dtype or not bias.numel() or min(queries, keys) < SMALLER:
        return None
    changes = (bias[..., queries // 2, 1:] != bias[..., queries // 2, :-1]).flatten(0, -2).any(0)  # a row is quick
    if SMALLER * (int(changes.sum()) + 1) > keys or not bool(bias.isfinite().all()):
        return None
    rows, columns = (bias[..., 1:] != bias[..., :-1]).flatten(0, -3).any(0).nonzero(as_tuple=True)
    last = (columns - rows).unique()  # the distances before each change
    if SMALLER * (len(last) + 1) > keys:
        return None
    distances = torch.arange(queries + keys - 1, device=bias.device) - (queries - 1)
    index = torch.searchsorted(last, distances)
    places = torch.arange(queries, device=bias.device).unsqueeze(-1) + torch.cat([distances[:1], last + 1])
    numbers = bias.gather(-1, places.clamp(0, keys - 1).expand(*bias.shape[:-1], -1))
    if not bool(numbers.flatten(0, -2).any(0).all()):
        return None  # 0 beside a band
    table = torch.eye(len(last) + 1, dtype=bias.dtype, device=bias.device)
    return DistanceProducts((DistanceTerm(numbers, table.expand(*bias.shape[:-2], -1, -1), index),))


def multiply_distances(vectors: Tensor, table: Tensor, index: Tensor, others: int) -> Tensor:
    """Compute vectors[i] · table[index[j - i + n - 1]] of n vectors (..., n, d) with `others` places j: (..., n, others)."""
    n, parts = vectors.shape[-2], []
    for start in range(0, n, ROWS):
        part = vectors[..., start : start + ROWS, :]
        rows = part.shape[-2]
        near = index[n - start - rows : n - start + others - 1]  # of the distances of these rows
        if len(near) > table.shape[-2]:
            products = (part @ table.mT).index_select(-1, near)
        else:
            products = part @ table.index_select(-2, near).mT
        parts.append(skew(products, others))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def skew(x: Tensor, columns: int) -> Tensor:
    """Return a view of x (..., n, n + columns - 1) whose entry j of row i is that at j - i + n - 1: (..., n, columns)."""
    x, n = x.contiguous(), x.shape[-2]
    strides = (*x.stride()[:-2], x.stride(-2) - 1, 1)
    return x.as_strided((*x.shape[:-1], columns), strides, x.storage_offset() + n - 1)


def add_up(tensors: list[Tensor]) -> Tensor:
    """Return the sum of tensors."""
    total = tensors[0]
    for x in tensors[1:]:
        total = total + x
    return total


def expand_term(term: DistanceTerm, shape: tuple[int, ...] | torch.Size) -> DistanceTerm:
    """Return a term expanded along the axes before those of queries and keys to those of a shape (..., q, k)."""
    vectors, table = (x.expand(*shape[:-2], *x.shape[-2:]) for x in (term.vectors, term.table))
    return replace(term, vectors=vectors, table=table)
