"""The entries of an AttributionMap of one head, block by block, and the sums and pictures of any signed map in one traversal.

This is the plain form in torch, which is the definition and runs on any device.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.map.plane import Plane, RowRun, multiply_exactly
from regard.map.pooling import Block, SignedPicture, choose_larger


@dataclass(frozen=True, eq=False)
class Products:
    """The products l_i · r_j of one head, and what they are multiplied by: a factor of `AttributionMap`."""

    left: Tensor  # (q, e)
    right: Tensor  # (k, e)
    factor: str
    means: Tensor | None  # (q,), of the products under the weights, for factor "cut"


@dataclass(frozen=True, eq=False)
class EntryStatistics:
    """The results of one traversal of the rows of a picture; the other rows are 0."""

    row_sums: Tensor  # (q,)
    column_sums: Tensor  # (k,)
    largest: Tensor  # (q,), in size, with its sign
    picture: SignedPicture


def iterate_entries(
    plane: Plane, products: Products, first: int = 0, last: int | None = None
) -> Iterator[tuple[RowRun, Tensor]]:
    """Yield runs of queries and keys, and the entries (n, m) of each, of all queries or of those from first to last."""
    for run in plane.iterate_runs(first, last):
        entries = multiply_exactly(products.left[run.start : run.stop], products.right[run.columns].T)
        if products.means is not None:
            entries = compute_cuts(run.weights, entries, products.means[run.start : run.stop].unsqueeze(-1))
        elif products.factor == "weights":
            entries.mul_(run.weights)
        else:
            entries.masked_fill_(run.masked == -torch.inf, 0)
        yield run, entries


def gather_entries(plane: Plane, products: Products, rows: Tensor, columns: Tensor) -> EntryStatistics:
    """Compute the statistics of one head as `gather_blocks` does; only the rows of the picture are traversed."""
    blocks, device = iterate_entries(plane, products, int(rows[0]), int(rows[-1])), products.left.device
    return gather_blocks(blocks, plane.shape, products.left.dtype, rows.to(device), columns.to(device))


def gather_blocks(
    blocks: Iterable[tuple[Block, Tensor]], shape: tuple[int, int], dtype: torch.dtype, rows: Tensor, columns: Tensor
) -> EntryStatistics:
    """Compute the sums of rows and columns, the largest entry of each row, and the picture, given the edges of its bins.

    blocks are pairs of a block and its entries (n, m); the sums are accumulated in float64, on the device of the edges.
    """
    picture = SignedPicture.allocate(rows, columns, dtype)
    row_sums, column_sums = (torch.zeros(n, dtype=torch.float64, device=rows.device) for n in shape)
    largest = torch.zeros(shape[0], dtype=dtype, device=rows.device)
    for block, entries in blocks:
        part = slice(block.start, block.stop)
        row_sums[part] = entries.sum(-1, dtype=torch.float64)
        column_sums.index_add_(0, block.columns, entries.sum(0, dtype=torch.float64))
        if entries.numel():
            largest[part] = choose_larger(entries.amax(-1), entries.amin(-1)).to(dtype)
            picture.add_run(block, entries.to(dtype))
    return EntryStatistics(row_sums.to(dtype), column_sums.to(dtype), largest, picture)


def compute_cuts(weights: Tensor, products: Tensor, means: Tensor) -> Tensor:
    """Compute -w / (1 - w) (p - m) elementwise; -p where w is 1 up to rounding, of the only key that a query sees."""
    rest = 1 - weights
    is_only = rest <= 8 * torch.finfo(products.dtype).eps
    return torch.where(is_only, -products, -weights / rest.masked_fill(is_only, 1) * (products - means)).to(products.dtype)
