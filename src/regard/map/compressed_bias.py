"""The form of a bias that stores the least: by distances, of a text or of an image, by groups of keys, or all entries."""

import torch
from torch import Tensor

from regard.map.computed_bias import ComputedBias
from regard.map.distance_products import find_band, find_buckets
from regard.map.grid_bias import find_grid
from regard.map.grouped_bias import group_keys
from regard.map.relative_bias import find_diagonals


def compress_bias(bias: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Return a bias (..., q, k) that is stored whole in a form that stores less of it, else as it is.

    The entries of keys that are hidden, bool (..., q, k), do not count, and may be others in that form.
    """
    if isinstance(bias, ComputedBias):
        return bias
    for find in (find_diagonals, find_band, group_keys, find_buckets, find_grid):
        found = find(bias)
        if found is not None:
            return found
    if hidden is None or any(m not in (1, n) for m, n in zip(hidden.shape, bias.shape, strict=True)) or not hidden.any():
        return bias
    filled = compress_bias(fill_hidden(bias, hidden))
    return filled if isinstance(filled, ComputedBias) else bias


def fill_hidden(bias: Tensor, hidden: Tensor) -> Tensor:
    """Return a bias that has for each hidden key the number of the query's first key that is not hidden."""
    first = hidden.int().argmin(-1, keepdim=True)
    return torch.where(hidden, bias.gather(-1, first.expand(*bias.shape[:-1], 1)), bias)
