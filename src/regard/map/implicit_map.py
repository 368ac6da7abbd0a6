"""ImplicitMap: the token-to-token matrix of a layer whose weights are no softmax, as the factors that give it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import indexing
from regard.map.attention_map import Index
from regard.map.convolution import Convolution, ConvolutionPlane
from regard.map.linear_recurrence import LinearRecurrence, RecurrencePlane
from regard.map.pooling import EntryBlock
from regard.map.recurrence_products import can_multiply_by_token, multiply_by_token, multiply_transpose_by_token
from regard.map.scored_matrix import ScoredMatrix, ScoredPlane
from regard.map.signed_map import SignedMap
from regard.map.stored_matrix import JoinedMatrices, JoinedPlane, StoredMatrix, StoredPlane
from regard.mechanism.arguments import check_integer, describe_value
from regard.mechanism.scores import score_dtype

BLOCK_ENTRIES = 2**21  # entries computed at a time: 16 MiB of float64
MOST_ROWS = 256  # of a block
Mechanism = LinearRecurrence | Convolution | ScoredMatrix | StoredMatrix
Plane = RecurrencePlane | ConvolutionPlane | ScoredPlane | StoredPlane | JoinedPlane
MECHANISMS: dict[str, type[LinearRecurrence] | type[Convolution] | type[ScoredMatrix] | type[StoredMatrix]] = {
    "linear recurrence": LinearRecurrence,
    "convolution": Convolution,
    "scored matrix": ScoredMatrix,
    "stored matrix": StoredMatrix,
}


@dataclass(frozen=True, eq=False)
class SampledOutputs:
    """What a layer's own code computed for some of the queries of a map: queries (n,), outputs (b, h, n, e).

    gates (b, h, n, e) are what it multiplied the rows of M v by, if it did so in each channel of a head.
    """

    queries: Tensor
    outputs: Tensor
    gates: Tensor | None = None


@dataclass(frozen=True)
class ImplicitCertificate:
    """The largest distance of a row times the values from the layer's own output, relative to a head's largest output.

    rows is the number of rows checked.
    """

    error: float
    rows: int


class ImplicitMap(SignedMap):
    """The matrix M (b, h, q, k) for which M v is the output of a layer whose weights are no softmax.

    mechanism is a LinearRecurrence (state spaces, linear attention, delta rules), a Convolution, a ScoredMatrix (an activation
    of scores, mixed or subtracted softmaxes) or a StoredMatrix, the only one that stores M itself. Entries are signed and rows
    do not sum to 1; those of later tokens of a recurrence are 0. The queries are the last ones of the mechanism, from `first`
    on. values (b, h, k, e) and outputs, if they are given, are what the layer multiplied and computed, for `certificate`.
    Numbers are computed in float64, block by block, and returned in float32, or in float64 if a factor is.
    Source: Ali, Zimerman and Wolf 2024, The hidden attention of Mamba models.
    """

    def __init__(
        self,
        mechanism: Mechanism | JoinedMatrices,
        *,
        first: int = 0,
        values: Tensor | None = None,
        outputs: SampledOutputs | None = None,
    ) -> None:
        if not isinstance(mechanism, Mechanism | JoinedMatrices):
            names = ", ".join(one.__name__ for one in MECHANISMS.values())
            raise ConfigError(f"mechanism must be one of {names}; got {describe_value(mechanism)}.")
        b, h, t = mechanism.shape
        if not 0 <= check_integer("first", first) <= mechanism.rows:
            raise ConfigError(f"first must be between 0 and the number of tokens, {mechanism.rows}; got {first}.")
        if values is not None and (values.dim() != 4 or values.shape[:3] != (b, h, t)):
            raise ShapeError(f"values must be ({b}, {h}, {t}, e), got {tuple(values.shape)}.")
        self.mechanism, self.first, self.values, self.outputs = mechanism, first, values, outputs
        self.places = [[(row, head) for head in range(h)] for row in range(b)]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (b, h, q, k)."""
        _, h, t = self.mechanism.shape
        return len(self.places), len(self.places[0]) if self.places else h, self.mechanism.rows - self.first, t

    @property
    def offset(self) -> int:
        """The place of the first query among the keys: the last queries belong to the last keys, if there are enough."""
        return self.first + max(0, self.shape[3] - self.mechanism.rows)

    @property
    def device(self) -> torch.device:
        """The device of every result."""
        return next(iter(self.mechanism.tensors.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every result, float32 or float64."""
        found = torch.float32
        for x in self.mechanism.tensors.values():
            found = torch.promote_types(found, score_dtype(x.dtype))
        return found

    @property
    def nbytes(self) -> int:
        """The bytes stored: the factors, the values and the sampled outputs; a memory that several share counts once."""
        tensors = [*self.mechanism.tensors.values(), self.values, None if self.outputs is None else self.outputs.outputs]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x is not None}
        return sum(storages.values())

    def select(self, batch: Index = slice(None), heads: Index = slice(None)) -> "ImplicitMap":
        """Return a smaller map of some batch rows and heads, still of four axes, sharing memory."""
        b, h, *_ = self.shape
        rows, columns = indexing.select_places("batch", batch, b).tolist(), indexing.select_places("heads", heads, h).tolist()
        smaller = ImplicitMap(self.mechanism, first=self.first, values=self.values, outputs=self.outputs)
        smaller.places = [[self.places[i][j] for j in columns] for i in rows]
        return smaller

    def build_plane(self, b: int, h: int) -> Plane:
        """Return the matrix of a batch row and head of this map."""
        plane: Plane = self.mechanism.build_plane(*self.places[b][h])
        return plane

    def iterate_plane(self, b: int, h: int) -> Iterator[tuple[EntryBlock, Tensor]]:
        """Yield the blocks of complete rows of one matrix, in order, and the entries (n, m) of each, in float64."""
        plane, start = self.build_plane(b, h), 0
        while start < self.shape[2]:
            first, last = plane.find_keys(self.first + start, self.first + start)
            width = max(1, last - first)
            stop = min(self.shape[2], start + max(1, min(MOST_ROWS, BLOCK_ENTRIES // width)))
            first, last = plane.find_keys(self.first + start, self.first + stop - 1)
            queries = torch.arange(self.first + start, self.first + stop, device=self.device)
            columns = torch.arange(first, last, device=self.device)
            yield EntryBlock(start, stop, columns), plane.compute_rows(queries, first, last)
            start = stop

    def __getitem__(self, index: Any) -> Tensor:
        """Return entries by ints, slices, lists and tensors, in the shape that torch would give; each costs its row."""
        index = indexing.expand_index(index)
        self.check_size(indexing.count_entries(self.shape, index), "m.pooled(rows, columns) or m.top(n)")
        if not isinstance(index[3], slice):
            places = indexing.coordinates(self.shape, index)
            b, h, i, j = (x.reshape(-1) for x in places)
            return self.gather(b, h, i, j.unsqueeze(-1)).view(places[0].shape)
        places = indexing.coordinates(self.shape[:3], index[:3])
        b, h, i = (x.reshape(-1) for x in places)
        keys = torch.arange(self.shape[3])[index[3]]
        return self.gather(b, h, i, keys.expand(len(b), -1)).view(*places[0].shape, len(keys))

    def gather(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return entries (n, m) of rows at coordinates (n,), on the keys j (n, m) of each."""
        found = torch.zeros(j.shape, dtype=self.dtype, device=self.device)
        for n, m, own_places in indexing.group_pairs(b, h, self.shape[1]) if j.numel() else ():
            plane = self.build_plane(n, m)
            queries, places = (i[own_places] + self.first).unique(return_inverse=True)
            step = max(1, min(MOST_ROWS, BLOCK_ENTRIES // self.shape[3]))
            for start in range(0, len(queries), step):
                some = queries[start : start + step]
                first, stop = plane.find_keys(int(some[0]), int(some[-1]))
                rows = plane.compute_rows(some.to(self.device), first, stop).to(self.dtype)
                mine = (places >= start) & (places < start + step)
                keys = j[own_places[mine]].to(self.device)
                is_inside = (keys >= first) & (keys < stop)
                values = rows[(places[mine] - start).to(self.device)].gather(1, (keys - first).clamp(0, stop - first - 1))
                found[own_places[mine].to(self.device)] = values.where(is_inside, 0)
        return found

    def __matmul__(self, x: Tensor) -> Tensor:
        """Compute the product with x (b, 1 or h, k, n), (b, h, q, n): that of a recurrence in one pass over the tokens."""
        if not isinstance(self.mechanism, LinearRecurrence) or not can_multiply_by_token(self.mechanism):
            return super().__matmul__(x)
        x = self.check_factor("x", x, self.shape[3])
        return multiply_by_token(self.mechanism, *self.index_places(), x)[:, :, self.first :].to(self.dtype)

    def multiply_transpose(self, r: Tensor) -> Tensor:
        """Compute the product of the transpose with r (b, h, q, n), (b, h, k, n): that of a recurrence in one pass."""
        if not isinstance(self.mechanism, LinearRecurrence) or not can_multiply_by_token(self.mechanism):
            return super().multiply_transpose(r)
        r = torch.nn.functional.pad(r, (0, 0, self.first, 0))
        return multiply_transpose_by_token(self.mechanism, *self.index_places(), r).to(self.dtype)

    def index_places(self) -> tuple[Tensor, Tensor]:
        """Return the batch rows (b,) and the heads (h,) of the mechanism that this map has, by index."""
        rows, heads = [places[0][0] for places in self.places if places], [head for _, head in (self.places or [[]])[0]]
        found = [torch.tensor(each, dtype=torch.long, device=self.device) for each in (rows, heads)]
        return found[0], found[1]

    def received(self) -> Tensor:
        """Compute the sum of each column, (b, h, k), with its sign."""
        return self.column_sums()

    def diagonal(self, back: int = 0) -> Tensor:
        """Return the entry of each query on the token `back` places before it, (b, h, q); 0 if there is no such token."""
        back = indexing.check_back(back)
        found = torch.zeros(self.shape[:3], dtype=self.dtype, device=self.device)
        for row, head, block, entries in self.iterate_blocks():
            queries = torch.arange(block.start, block.stop, device=self.device)
            places = queries + self.offset - back - block.columns[0]
            inside = (places >= 0) & (places < entries.shape[1])
            values = entries.gather(-1, places.clamp(0, entries.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
            found[row, head, block.start : block.stop] = values.where(inside, 0).to(self.dtype)
        return found

    def certificate(self) -> ImplicitCertificate:
        """Compute how far rows of M v are from what the layer's own code computed, relative to the largest output of the head.

        The rows are those whose outputs were recorded. Raises ConfigError if values or outputs are not part of this map.
        """
        if self.values is None or self.outputs is None:
            raise ConfigError("the map has no values and outputs to be checked against. Use a map of a recording.")
        error, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        queries = self.outputs.queries.to(self.device)
        queries = queries[queries >= self.first]
        for row, places in enumerate(self.places):
            for head, (b, h) in enumerate(places):
                entries = self[row, head, queries - self.first].double()
                values, outputs = (x[b, h].double() for x in (self.values, self.outputs.outputs))
                outputs, found = outputs[len(outputs) - len(queries) :], entries @ values + self.get_bias(h)
                if self.outputs.gates is not None:
                    found *= self.outputs.gates[b, h, -len(found) :].double()
                difference = (found - outputs).abs()
                if difference.numel() and difference.any():
                    error = error.maximum(difference.max() / outputs.abs().max())  # NaN if one of them is
                count += len(queries)
        return ImplicitCertificate(float(error), count)

    def get_bias(self, h: int) -> Tensor | float:
        """Return what a head's output has besides M v: the bias of a convolution."""
        bias = self.mechanism.bias if isinstance(self.mechanism, Convolution) else None
        return 0.0 if bias is None else bias[0, h].double()

    @property
    def title(self) -> str:
        """The name of the mechanism."""
        if isinstance(self.mechanism, LinearRecurrence | Convolution):
            return next(name for name, one in MECHANISMS.items() if isinstance(self.mechanism, one))
        return self.mechanism.title or "weights without a softmax"

    def __repr__(self) -> str:
        return f"ImplicitMap{self.shape}, {self.title}, {self.nbytes / 1e6:.3g} MB stored"
