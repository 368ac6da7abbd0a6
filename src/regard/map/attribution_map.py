"""AttributionMap: what each weight does to a number, as a matrix that is never stored."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import attribution_passes, compiled_passes, indexing, pass_runner, pooling
from regard.map.attention_map import AttentionMap, Index
from regard.map.attribution_passes import EntryStatistics, Products, compute_cuts, iterate_entries
from regard.map.hiding_bias import drop_repeats, replace_hiding_numbers
from regard.map.plane import BLOCK_NUMBERS, Plane, RowRun, multiply_exactly
from regard.map.signed_map import SharedAxes, SignedMap
from regard.mechanism.arguments import check_choice, check_instance, describe_value
from regard.mechanism.request import Request
from regard.mechanism.scores import score_dtype

FACTORS = {"one": "products", "weights": "weights times products", "cut": "changes by hidden keys"}  # and what the map is


@dataclass(frozen=True)
class AttributionCertificate:
    """The largest distance of a row's sum from its product with the context, relative to its terms; the rows checked."""

    error: float
    rows: int


class AttributionMap(SharedAxes, SignedMap):
    """f(A_ij) (l_i · r_j), (b, h, q, k), of which only the map A, l and r are stored.

    With l the gradient of a number with respect to each head's context, and r the values, l_i · r_j is the gradient with
    respect to the weight A_ij. factor says what it is multiplied by: "one"; "weights", A_ij, for weight times gradient, the
    pull of a weight on the number; or "cut", for -A_ij / (1 - A_ij) (l_i · r_j - Σ_m A_im l_i · r_m), by how much the number
    changes, to first order in the context, if key j is hidden and the other weights grow. Where A_ij is 1 up to rounding,
    nothing is left of the context. left is (b, h, q, e), right (b, g, k, e), where g divides h. Entries that the mask hides
    are 0. Numbers are float32 at least, computed in blocks.
    """

    weights: AttentionMap

    def __init__(self, weights: AttentionMap, left: Tensor, right: Tensor, *, factor: str = "weights") -> None:
        b, h, q, k = check_instance("weights", weights, AttentionMap).shape
        for name, x, shape in (("left", left, (b, h, q)), ("right", right, (b, None, k))):
            fits = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
            if not fits or any(size not in (None, got) for size, got in zip(shape, x.shape[:3], strict=True)):
                wanted = ", ".join("g" if size is None else str(size) for size in shape)
                raise ShapeError(f"{name} must be a floating point tensor ({wanted}, e), got {describe_value(x)}.")
        if left.shape[3] != right.shape[3] or not right.shape[1] or h % right.shape[1]:
            raise ShapeError(
                f"left (b, h, q, e) and right (b, g, k, e) must have the same e, and g must divide h; got {tuple(left.shape)} "
                f"and {tuple(right.shape)}."
            )
        dtype = score_dtype(torch.promote_types(left.dtype, right.dtype))
        self.weights, self.factor = weights, check_choice("factor", factor, tuple(FACTORS))
        self.left, self.right = left.detach().to(dtype), right.detach().to(dtype)

    @classmethod
    def differentiate_scores(cls, weights: AttentionMap, left: Tensor, right: Tensor) -> "AttributionMap":
        """Return the gradient with respect to the scores that the softmax takes: A_ij (l_i · r_j - Σ_m A_im l_i · r_m).

        It is a map of weights times products, of l with -Σ_m A_im l_i · r_m appended and r with 1, whose rows add up to 0.
        """
        full_map = cls(weights, left, right)
        means = (full_map.left * (weights @ full_map.right)).sum(-1, keepdim=True)
        ones = full_map.right.new_ones(*full_map.right.shape[:3], 1)
        return cls(weights, torch.cat([full_map.left, -means], -1), torch.cat([full_map.right, ones], -1))

    @cached_property
    def means(self) -> Tensor | None:
        """Σ_m A_im l_i · r_m for factor "cut", (b, h, q)."""
        return (self.left * (self.weights @ self.right)).sum(-1) if self.factor == "cut" else None

    @cached_property
    def visible_request(self) -> Request:
        """The arguments of the weights, with -inf for each finite number of the bias that hides its key."""
        return replace_hiding_numbers(self.weights.planes.request)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every result."""
        return self.left.dtype

    @property
    def nbytes(self) -> int:
        """The bytes stored, with those of a bias that was needed with -inf for the numbers that hide keys."""
        request = self.__dict__.get("visible_request")
        bias = None if request is None or request is self.weights.planes.request else request.bias
        return self.weights.nbytes + self.left.nbytes + self.right.nbytes + (0 if bias is None else drop_repeats(bias).nbytes)

    def select(self, batch: Index = slice(None), heads: Index = slice(None)) -> "AttributionMap":
        """Return a smaller map of some batch rows and heads, still of four axes."""
        b, h, *_ = self.shape
        rows, columns = indexing.select_places("batch", batch, b), indexing.select_places("heads", heads, h)
        groups = columns * self.right.shape[1] // h
        return AttributionMap(
            self.weights.select(batch=rows, heads=columns),
            self.left[rows][:, columns],
            self.right[rows][:, groups],
            factor=self.factor,
        )

    def __getitem__(self, index: Any) -> Tensor:
        """Return entries by ints, slices, lists and tensors, in the shape that torch would give."""
        index = indexing.expand_index(index)
        weights = self.weights[index]
        products = self.multiply_rows(index) if isinstance(index[3], slice) else self.multiply_pairs(index)
        if self.factor == "weights":
            return products * weights
        b, h, i, j = indexing.coordinates(self.shape, index)
        if self.means is None:
            return products.where(self.is_visible(b, h, i, j), 0)
        return compute_cuts(weights, products, self.means[b, h, i])

    def multiply_rows(self, index: tuple[Any, ...]) -> Tensor:
        """Return l_i · r_j of rows by index on a slice of the keys."""
        places = indexing.coordinates(self.shape[:3], index[:3])
        b, h, i = (x.flatten() for x in places)
        right, share = self.right[:, :, index[3]], self.shape[1] // self.right.shape[1]
        found = self.left.new_empty(len(b), right.shape[2])
        for n, m, some in indexing.group_pairs(b, h // share, right.shape[1]):
            found[some.to(found.device)] = multiply_exactly(self.left[n, h[some], i[some]], right[n, m].T)
        return found.view(*places[0].shape, right.shape[2])

    def multiply_pairs(self, index: tuple[Any, ...]) -> Tensor:
        """Return l_i · r_j of entries by index, a block of numbers at a time."""
        b, h, i, j = indexing.coordinates(self.shape, index)
        step = max(1, BLOCK_NUMBERS // max(1, self.left.shape[3]))
        parts = zip(*(x.flatten().split(step) for x in (b, h, h * self.right.shape[1] // self.shape[1], i, j)), strict=True)
        found = [(self.left[n, head, query] * self.right[n, group, key]).sum(-1) for n, head, group, query, key in parts]
        return torch.cat(found).view(b.shape)

    def is_visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return whether queries may see keys, all by index and of one shape."""
        found, i, j = torch.empty(b.numel(), dtype=torch.bool, device=self.device), i.flatten(), j.flatten()
        for n, m, some in indexing.group_pairs(b, h, self.shape[1]):
            plane = Plane(self.visible_request, *self.weights.planes.pairs[n][m])
            seen = plane.can_see(i[some], j[some])
            found[some] = seen if plane.bias is None else seen & (plane.bias[i[some], j[some]] != -math.inf)
        return found.view(b.shape)

    def get_plane(self, b: int, h: int) -> tuple[Plane, Products]:
        """Return the weights and products of a head."""
        means = None if self.means is None else self.means[b, h]
        right = self.right[b, h * self.right.shape[1] // self.shape[1]]
        request = self.visible_request if self.factor == "one" else self.weights.planes.request  # where others are 0 anyway
        return Plane(request, *self.weights.planes.pairs[b][h]), Products(self.left[b, h], right, self.factor, means)

    def iterate_plane(self, b: int, h: int) -> Iterator[tuple[RowRun, Tensor]]:
        return iterate_entries(*self.get_plane(b, h))

    def draw_pictures(self, rows: Tensor, columns: Tensor) -> list[pooling.SignedPicture]:
        """Draw the picture of each head, given the edges of its bins in tokens."""
        return [one.picture for one in self.gather_entries(rows, columns)]

    def gather_entries(self, rows: Tensor, columns: Tensor) -> list[EntryStatistics]:
        """Traverse each head by the fastest pass available, given the edges of the picture's bins, of whose rows alone."""
        heads = dict(self.get_plane(b, h) for b in range(self.shape[0]) for h in range(self.shape[1]))
        quick: Sequence[EntryStatistics | None] = [None] * len(heads)
        has_products = self.left.dtype == torch.float32 and self.left.shape[3] and rows[0] < rows[-1]
        if heads and has_products and compiled_passes.can_run_compiled(next(iter(heads))):
            quick = pass_runner.run_planes(
                list(heads), lambda plane, threads: compiled_passes.gather_entries(plane, threads, heads[plane], rows, columns)
            )
        pairs = zip(heads.items(), quick, strict=True)
        return [one or attribution_passes.gather_entries(*head, rows, columns) for head, one in pairs]

    def certificate(self) -> AttributionCertificate:
        """Compute how far the rows are from the identity Σ_j A_ij (l_i · r_j) = l_i · (A r)_i, relative to the terms' sizes.

        The right side is a product of the map and r. For another factor than the weights there is no such identity: raises
        ConfigError.
        """
        if self.factor != "weights":
            raise ConfigError("only a map of weights times products, such as kind='pull', has sums that can be checked.")
        expected = (self.left * (self.weights @ self.right)).sum(-1)
        found, size = torch.zeros_like(expected), torch.zeros_like(expected)
        for n, m, run, entries in self.iterate_blocks():
            found[n, m, run.start : run.stop] = entries.sum(-1)
            size[n, m, run.start : run.stop] = entries.abs().sum(-1)
        error = ((found - expected).abs() / size.clamp(min=torch.finfo(size.dtype).tiny)).where(size != 0, 0)
        return AttributionCertificate(float(error.max()) if error.numel() else 0.0, error.numel())

    def __repr__(self) -> str:
        return f"AttributionMap{self.shape}, {FACTORS[self.factor]}, {self.nbytes / 1e6:.3g} MB stored"
