"""A map pooled to few cells at low cost, at any length: all of it where that is quick, else some evenly spaced queries."""

import torch
from torch import Tensor

from regard.map import AttentionMap
from regard.map.pooling import bin_edges

MAX_FULL_WEIGHTS = 2**24  # maximum weights of a head that are all read
CHUNK_WEIGHTS = 2**22  # maximum weights in memory at a time


def pool_cells(m: AttentionMap, most: int, quick: int = MAX_FULL_WEIGHTS) -> tuple[Tensor, bool]:
    """Compute the largest weights (h, rows, columns) of at most `most` bins per axis, and whether only some rows were sampled.

    Uses the first batch row; a head of more than `quick` weights is sampled. A bin that is 0 everywhere, for example because
    its keys are hidden, is NaN.
    """
    _, h, q, k = m.shape
    size = min(q, most), min(k, most)
    first = m.select(batch=[0])
    if q * k <= quick:
        found = first.pooled(*size, how="max")[0]
    else:
        found = torch.stack([sample_rows(first.select(heads=[head]), *size) for head in range(h)])
    return found.double().cpu().masked_fill(found.cpu() == 0, torch.nan), q * k > quick


def sample_rows(m: AttentionMap, rows: int, columns: int) -> Tensor:
    """Compute some queries of a map of one matrix, with the columns in bins of the largest weight."""
    q, k = m.shape[2:]
    queries = bin_edges(0, q, rows)[1:] - 1  # the last of each bin, which sees the most keys
    bins = torch.bucketize(torch.arange(k), bin_edges(0, k, columns)[1:], right=True)
    found = []
    for part in queries.split(max(CHUNK_WEIGHTS // k, 1)):
        weights = m[0, 0, part].cpu()
        found.append(weights.new_zeros(len(part), columns).scatter_reduce(1, bins.expand(len(part), -1), weights, "amax"))
    return torch.cat(found)
