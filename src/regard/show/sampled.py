"""A map in few cells at little cost, at any length: whole where that is quick, else some of its queries, evenly spaced."""

import torch
from torch import Tensor

from regard.map import AttentionMap
from regard.map.pooling import edges

QUICK = 2**24  # weights of a head that are all looked at
AT_ONCE = 2**22  # weights held at a time


def cells(m: AttentionMap, most: int, quick: int = QUICK) -> tuple[Tensor, bool]:
    """The largest weights (h, rows, columns) of bins, at most so many along each axis, and whether rows are only sampled.

    Of the first batch row; a head of more than `quick` weights is sampled.
    What is 0 everywhere in a bin, as where a query may not see, is NaN.
    """
    _, h, q, k = m.shape
    size = min(q, most), min(k, most)
    first = m.select(batch=[0])
    if q * k <= quick:
        found = first.pooled(*size, how="max")[0]
    else:
        found = torch.stack([rows_of(first.select(heads=[head]), *size) for head in range(h)])
    return found.double().cpu().masked_fill(found.cpu() == 0, torch.nan), q * k > quick


def rows_of(m: AttentionMap, rows: int, columns: int) -> Tensor:
    """Some queries of a map of one matrix, the columns in bins that hold the largest weight."""
    q, k = m.shape[2:]
    queries = edges(0, q, rows)[1:] - 1  # the last of each bin, which sees most
    bins = torch.bucketize(torch.arange(k), edges(0, k, columns)[1:], right=True)
    found = []
    for part in queries.split(max(AT_ONCE // k, 1)):
        weights = m[0, 0, part].cpu()
        found.append(weights.new_zeros(len(part), columns).scatter_reduce(1, bins.expand(len(part), -1), weights, "amax"))
    return torch.cat(found)
