"""ImplicitAttributionMap: what each entry of a map without a softmax does to a number, as a matrix that is never stored."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import indexing
from regard.map.attention_map import Index
from regard.map.convolution import Convolution
from regard.map.implicit_map import ImplicitMap
from regard.map.linear_recurrence import LinearRecurrence
from regard.map.plane import BLOCK_NUMBERS, multiply_exactly
from regard.map.pooling import EntryBlock
from regard.map.signed_map import SharedAxes, SignedMap
from regard.mechanism.arguments import check_choice, check_instance, describe_value

FACTORS = {"one": "products", "weights": "weights times products"}  # and what the map is


class ImplicitAttributionMap(SharedAxes, SignedMap):
    """f(M_ij) (l_i · r_j), (b, h, q, k), of which only the factors of M, l and r are stored.

    With l (b, h, q, e) the gradient of a number with respect to M v and r (b, h, k, e) the values, l_i · r_j is the gradient
    with respect to the entry M_ij. factor says what it is multiplied by: "one", or "weights", M_ij, for entry times gradient,
    whose sum over a row is l_i · (M r)_i. Entries for keys that the mechanism cannot reach, as later ones, are 0. Numbers are
    computed in float64, block by block.
    """

    weights: ImplicitMap

    def __init__(self, weights: ImplicitMap, left: Tensor, right: Tensor, *, factor: str = "weights") -> None:
        b, h, q, k = check_instance("weights", weights, ImplicitMap).shape
        for name, x, shape in (("left", left, (b, h, q)), ("right", right, (b, h, k))):
            if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[:3] != shape or x.shape[3] != left.shape[3]:
                raise ShapeError(f"{name} must be a tensor ({', '.join(map(str, shape))}, e), got {describe_value(x)}.")
        if not isinstance(weights.mechanism, LinearRecurrence | Convolution):
            raise ConfigError(f"weights must be of a recurrence or a convolution, got {weights}.")
        self.weights, self.factor = weights, check_choice("factor", factor, tuple(FACTORS))
        self.mechanism, self.left, self.right = weights.mechanism, left.detach(), right.detach()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every result, float32 or float64."""
        return torch.promote_types(self.weights.dtype, self.left.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes stored; values that the map of the weights has too count once."""
        values = self.weights.values
        is_shared = values is not None and values.data_ptr() == self.right.data_ptr()
        return self.weights.nbytes + self.left.nbytes + (0 if is_shared else self.right.nbytes)

    def select(self, batch: Index = slice(None), heads: Index = slice(None)) -> "ImplicitAttributionMap":
        """Return a smaller map of some batch rows and heads, still of four axes."""
        b, h, *_ = self.shape
        rows, columns = indexing.select_places("batch", batch, b), indexing.select_places("heads", heads, h)
        left, right = (x[rows][:, columns] for x in (self.left, self.right))
        return ImplicitAttributionMap(self.weights.select(rows, columns), left, right, factor=self.factor)

    def iterate_plane(self, b: int, h: int) -> Iterator[tuple[EntryBlock, Tensor]]:
        """Yield the blocks of complete rows of one matrix, in order, and the entries (n, m) of each, in float64."""
        left, right = self.left[b, h].double(), self.right[b, h].double()
        for block, entries in self.weights.iterate_plane(b, h):
            products = multiply_exactly(left[block.start : block.stop], right[block.columns].T)
            queries = torch.arange(block.start, block.stop, device=self.device).unsqueeze(-1) + self.weights.offset
            is_reached = self.mechanism.can_reach(queries - block.columns)
            yield block, products * entries if self.factor == "weights" else products.where(is_reached, 0)

    def __getitem__(self, index: Any) -> Tensor:
        """Return entries by ints, slices, lists and tensors, in the shape that torch would give; each costs its row."""
        index = indexing.expand_index(index)
        factors = self.weights[index] if self.factor == "weights" else None
        b, h, i, j = indexing.coordinates(self.shape, index)
        step = max(1, BLOCK_NUMBERS // max(1, self.left.shape[3]))
        parts = zip(*(x.flatten().split(step) for x in (b, h, i, j)), strict=True)
        products = [(self.left[n, m, query].double() * self.right[n, m, key].double()).sum(-1) for n, m, query, key in parts]
        found = torch.cat(products).view(b.shape) if products else self.left.new_zeros(b.shape)
        found = found.where(self.mechanism.can_reach(i + self.weights.offset - j), 0) if factors is None else found * factors
        return found.to(self.dtype)

    def __repr__(self) -> str:
        return f"ImplicitAttributionMap{self.shape}, {FACTORS[self.factor]}, {self.nbytes / 1e6:.3g} MB stored"
