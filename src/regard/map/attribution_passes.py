"""The entries of an AttributionMap of one head, block by block."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.map.entry_statistics import EntryStatistics, gather_blocks
from regard.map.plane import Plane, Run, multiply_exactly


@dataclass(frozen=True, eq=False)
class Products:
    """The products l_i · r_j of one head, and what they are multiplied by: a factor of `AttributionMap`."""

    left: Tensor  # (q, e)
    right: Tensor  # (k, e)
    factor: str
    means: Tensor | None  # (q,), of the products under the weights, for factor "cut"


def iterate_entries(plane: Plane, products: Products) -> Iterator[tuple[Run, Tensor]]:
    """Yield runs of queries and keys, and the entries (n, m) of each."""
    for run in plane.iterate_runs():
        entries = multiply_exactly(products.left[run.start : run.stop], products.right[run.columns].T)
        if products.means is not None:
            entries = compute_cuts(run.weights, entries, products.means[run.start : run.stop].unsqueeze(-1))
        elif products.factor == "weights":
            entries.mul_(run.weights)
        else:
            entries.masked_fill_(run.masked == -torch.inf, 0)
        yield run, entries


def gather_entries(plane: Plane, products: Products, rows: Tensor, columns: Tensor) -> EntryStatistics:
    """Compute the sums of rows and columns, the largest entry of each row, and the picture, given the edges of its bins."""
    edges = (x.to(products.left.device) for x in (rows, columns))
    return gather_blocks(iterate_entries(plane, products), plane.shape, products.left.dtype, *edges)


def compute_cuts(weights: Tensor, products: Tensor, means: Tensor) -> Tensor:
    """Compute -w / (1 - w) (p - m) elementwise; -p where w is 1 up to rounding, of the only key that a query sees."""
    rest = 1 - weights
    is_only = rest <= 8 * torch.finfo(products.dtype).eps
    return torch.where(is_only, -products, -weights / rest.masked_fill(is_only, 1) * (products - means)).to(products.dtype)
