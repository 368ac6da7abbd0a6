"""Sums, largest entries and a picture of one signed matrix, gathered from its rows a block at a time."""

from collections.abc import Iterable

import torch
from torch import Tensor

from regard.map.attribution_passes import EntryStatistics
from regard.map.pooling import EntryBlock, SignedPicture, choose_larger


def gather_blocks(
    blocks: Iterable[tuple[EntryBlock, Tensor]],
    shape: tuple[int, int],
    dtype: torch.dtype,
    rows: Tensor,
    columns: Tensor,
) -> EntryStatistics:
    """Compute the sums of rows and columns, the largest entry of each row, and the picture, given the edges of its bins.

    blocks are pairs of a block and its entries (n, m); the sums are accumulated in float64. This is the plain form in torch,
    which is the definition and runs on any device, that of the edges.
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
