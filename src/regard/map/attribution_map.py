"""AttributionMap: what each weight does to a number, as a matrix that is never stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.html_repr import HtmlRepr
from regard.map import indexing, pooling
from regard.map.attention_map import PICTURE_BINS, AttentionMap, Index
from regard.map.plane import BLOCK_NUMBERS, Plane, Run
from regard.map.pooling import assign_bins, bin_edges
from regard.mechanism.arguments import check_choice, check_instance, check_integer, describe_value
from regard.mechanism.heads import share
from regard.mechanism.request import disable_autocast
from regard.mechanism.scores import score_dtype

FACTORS = {"one": "products", "weights": "weights times products", "cut": "changes by hidden keys"}  # and what the map is


@dataclass(frozen=True, eq=False)
class AttributionOverview:
    """Statistics of an AttributionMap from one traversal.

    row_sums (b, h, q) and column_sums (b, h, k); largest (b, h, q), the entry of each row that is largest in size, with its
    sign; mean (b, h, rows, columns), a picture of signed means, and max, of the entries that are largest in size.
    """

    row_sums: Tensor
    column_sums: Tensor
    largest: Tensor
    mean: Tensor
    max: Tensor


@dataclass(frozen=True)
class AttributionCertificate:
    """The largest distance of a row's sum from its product with the context, relative to its terms; the rows checked."""

    error: float
    rows: int


class AttributionMap(HtmlRepr):
    """f(A_ij) (l_i · r_j), (b, h, q, k), of which only the map A, l and r are stored.

    With l the gradient of a number with respect to each head's context, and r the values, l_i · r_j is the gradient with
    respect to the weight A_ij. factor says what it is multiplied by: "one"; "weights", A_ij, for weight times gradient, the
    pull of a weight on the number; or "cut", for -A_ij / (1 - A_ij) (l_i · r_j - Σ_m A_im l_i · r_m), by how much the number
    changes, to first order in the context, if key j is hidden and the other weights grow. Where A_ij is 1 up to rounding,
    nothing is left of the context. left is (b, h, q, e), right (b, g, k, e), where g divides h. Entries that the mask hides
    are 0. Numbers are float32 at least, computed in blocks.
    """

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
        self.means = (self.left * (weights @ self.right)).sum(-1) if factor == "cut" else None  # Σ_m A_im l_i · r_m, (b, h, q)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape (b, h, q, k)."""
        return self.weights.shape

    @property
    def device(self) -> torch.device:
        """The device of every result."""
        return self.weights.device

    @property
    def nbytes(self) -> int:
        """The bytes stored."""
        return self.weights.nbytes + self.left.nbytes + self.right.nbytes

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
        weights = self.weights[index]
        b, h, i, j = indexing.coordinates(self.shape, indexing.expand_index(index))
        products = self.multiply_pairs(b, h, i, j)
        if self.factor == "one":
            return products.where(self.is_visible(b, h, i, j), 0)
        return products * weights if self.means is None else compute_cuts(weights, products, self.means[b, h, i])

    def multiply_pairs(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return l_i · r_j of queries and keys, all by index and of one shape, a block of numbers at a time."""
        step = max(1, BLOCK_NUMBERS // max(1, self.left.shape[3]))
        parts = zip(*(x.flatten().split(step) for x in (b, h, h * self.right.shape[1] // self.shape[1], i, j)), strict=True)
        found = [(self.left[n, head, query] * self.right[n, group, key]).sum(-1) for n, head, group, query, key in parts]
        return torch.cat(found).view(b.shape)

    def is_visible(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return whether queries may see keys, all by index and of one shape."""
        found = torch.empty(b.shape, dtype=torch.bool, device=self.device)
        for n, m in torch.stack([b.flatten(), h.flatten()]).unique(dim=1).T.tolist():
            here = (b == n) & (h == m)
            plane = Plane(self.weights._request, *self.weights._pairs[n][m])
            seen = plane.can_see(i[here], j[here])
            found[here] = seen if plane.bias is None else seen & (plane.bias[i[here], j[here]] != -torch.inf)
        return found

    def iterate_blocks(self) -> Iterator[tuple[int, int, Run, Tensor]]:
        """Yield batch row, head, the run of queries and keys, and the entries (n, m) of it."""
        right = share(self.right, self.shape[1])
        for b, row in enumerate(self.weights._pairs):
            for h, pair in enumerate(row):
                for run in Plane(self.weights._request, *pair).iterate_runs():
                    with disable_autocast(self.device):
                        entries = self.left[b, h, run.start : run.stop] @ right[b, h, run.columns].T
                    if self.means is not None:
                        entries = compute_cuts(run.weights, entries, self.means[b, h, run.start : run.stop].unsqueeze(-1))
                    elif self.factor == "weights":
                        entries.mul_(run.weights)
                    else:
                        entries.masked_fill_(run.masked == -torch.inf, 0)
                    yield b, h, run, entries

    def row_sums(self) -> Tensor:
        """Compute the sum of each row, (b, h, q)."""
        return self.overview(1).row_sums

    def column_sums(self) -> Tensor:
        """Compute the sum of each column, (b, h, k)."""
        return self.overview(1).column_sums

    def overview(self, bins: int = PICTURE_BINS) -> AttributionOverview:
        """Compute all statistics and pictures of at most `bins` bins along each axis, in one traversal."""
        b, h, q, k = self.shape
        edges = [bin_edges(0, size, min(size, check_integer("bins", bins))).to(self.device) for size in (q, k)]
        size = len(edges[0]) - 1, len(edges[1]) - 1
        rows, columns = (torch.zeros(b, h, n, dtype=torch.float64, device=self.device) for n in (q, k))
        largest = torch.zeros(b, h, q, dtype=self.left.dtype, device=self.device)
        total = torch.zeros(b, h, *size, dtype=torch.float64, device=self.device)
        most = torch.zeros(b, h, *size, dtype=self.left.dtype, device=self.device)
        for n, m, run, entries in self.iterate_blocks():
            part = slice(run.start, run.stop)
            rows[n, m, part] = entries.sum(-1, dtype=torch.float64)
            columns[n, m].index_add_(0, run.columns, entries.sum(0, dtype=torch.float64))
            if entries.numel():
                largest[n, m, part] = take_largest(entries, -1)
                add_to_picture(total[n, m], most[n, m], edges, run, entries)
        area = edges[0].diff().unsqueeze(-1) * edges[1].diff()
        dtype = self.left.dtype
        return AttributionOverview(rows.to(dtype), columns.to(dtype), largest, (total / area.clamp(min=1)).to(dtype), most)

    def pooled(self, rows: int, columns: int, how: pooling.How = "mean") -> Tensor:
        """Pool the matrix into bins, (b, h, rows, columns): the signed mean or sum, or the entry that is largest in size."""
        size = pooling.check_picture_size(how, (rows, columns))
        b, h, q, k = self.shape
        edges = [bin_edges(0, length, bins).to(self.device) for length, bins in zip((q, k), size, strict=True)]
        total = torch.zeros(b, h, *size, dtype=torch.float64, device=self.device)
        most = torch.zeros(b, h, *size, dtype=self.left.dtype, device=self.device)
        for n, m, run, entries in self.iterate_blocks():
            add_to_picture(total[n, m], most[n, m], edges, run, entries)
        if how == "max":
            return most
        area = edges[0].diff().unsqueeze(-1) * edges[1].diff()
        return (total if how == "sum" else total / area.clamp(min=1)).to(self.left.dtype)

    def top(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the n entries of each row that are largest in size, with their signs, and their keys, both (b, h, q, n)."""
        b, h, q, k = self.shape
        if not 1 <= check_integer("n", n) <= k:
            raise ConfigError(f"n must be at least 1 and at most the number of keys, {k}; got {describe_value(n)}.")
        values = torch.zeros(b, h, q, n, dtype=self.left.dtype, device=self.device)
        keys = torch.arange(n, device=self.device).repeat(b, h, q, 1)
        for row, head, run, entries in self.iterate_blocks():
            count = min(n, entries.shape[1])
            places = entries.abs().topk(count, -1).indices
            values[row, head, run.start : run.stop, :count] = entries.gather(-1, places)
            keys[row, head, run.start : run.stop, :count] = run.columns[places]
        return values, keys

    def __matmul__(self, x: Tensor) -> Tensor:
        """Compute the product with x (b, 1 or h, k, n), (b, h, q, n), block by block."""
        b, h, q, k = self.shape
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[0] != b or x.shape[1] not in (1, h) or x.shape[2] != k:
            raise ShapeError(f"x must be ({b}, 1 or {h}, {k}, n), got {describe_value(x)}.")
        x = x.to(self.left.dtype).expand(b, h, k, -1)
        found = torch.zeros(b, h, q, x.shape[3], dtype=self.left.dtype, device=self.device)
        for n, m, run, entries in self.iterate_blocks():
            found[n, m, run.start : run.stop] = entries @ x[n, m, run.columns]
        return found

    def dense(self) -> Tensor:
        """Return the matrix itself, (b, h, q, k). Raises TooLargeError beyond a gigabyte."""
        return self[...]

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
        error = ((found - expected).abs() / size.clamp(min=torch.finfo(size.dtype).tiny)).where(size > 0, 0)
        return AttributionCertificate(float(error.max()) if error.numel() else 0.0, error.numel())

    def __repr__(self) -> str:
        return f"AttributionMap{self.shape}, {FACTORS[self.factor]}, {self.nbytes / 1e6:.3g} MB stored"


def compute_cuts(weights: Tensor, products: Tensor, means: Tensor) -> Tensor:
    """Compute -w / (1 - w) (p - m) elementwise; -p where w is 1 up to rounding, of the only key that a query sees."""
    rest = 1 - weights
    is_only = rest <= 8 * torch.finfo(products.dtype).eps
    return torch.where(is_only, -products, -weights / rest.masked_fill(is_only, 1) * (products - means)).to(products.dtype)


def take_largest(entries: Tensor, axis: int) -> Tensor:
    """Return the entries that are largest in size along an axis, with their signs."""
    return choose_larger(entries.amax(axis), entries.amin(axis))


def choose_larger(high: Tensor, low: Tensor) -> Tensor:
    """Return the larger in size of two numbers, elementwise, of which high is not below low."""
    return torch.where(-low > high, low, high)


def add_to_picture(total: Tensor, most: Tensor, edges: list[Tensor], run: Run, entries: Tensor) -> None:
    """Add a run of entries (n, m) to a picture of their sums and of those that are largest in size, in place."""
    (i, _), (j, _) = (
        assign_bins(torch.arange(run.start, run.stop, device=entries.device), edges[0]),
        assign_bins(run.columns, edges[1]),
    )
    across = entries.new_zeros(len(i), total.shape[1])
    total.index_add_(0, i, across.index_add(1, j, entries).double())
    high, low = (
        entries.new_zeros(total.shape).scatter_reduce(
            0,
            i.unsqueeze(-1).expand(-1, total.shape[1]),
            across.scatter_reduce(1, j.expand(len(i), -1), entries, how),
            how,
        )
        for how in ("amax", "amin")
    )
    both = choose_larger(high, low)
    most.copy_(torch.where(both.abs() > most.abs(), both, most))
