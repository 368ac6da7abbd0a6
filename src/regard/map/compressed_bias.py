"""The form of a bias that stores the least: by distances, of a text or of an image, by groups of keys, or all entries."""

from torch import Tensor

from regard.map.computed_bias import ComputedBias
from regard.map.distance_products import find_band, find_buckets
from regard.map.grid_bias import find_grid
from regard.map.grouped_bias import group_keys
from regard.map.relative_bias import find_diagonals


def compress_bias(bias: Tensor) -> Tensor:
    """Return a bias (..., q, k) that is stored whole in a form that stores less of it, else as it is."""
    if isinstance(bias, ComputedBias):
        return bias
    for find in (find_diagonals, find_band, group_keys, find_buckets, find_grid):
        found = find(bias)
        if found is not None:
            return found
    return bias
