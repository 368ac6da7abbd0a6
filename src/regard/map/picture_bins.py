"""The bins of the pictures that the compiled passes draw; bins with too many rows for one thread are split."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.map.pooling import BinnedWeights

if TYPE_CHECKING:
    from regard.map.pass_inputs import Floats, Integers, Sums

LARGEST = 256  # most rows of a bin for one thread


class PictureBins:
    """The edges of the bins of a picture, of which those of too many rows are split."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        self.rows, self.columns = rows, columns
        starts = rows.numpy()
        sizes = np.diff(starts)
        pieces = (sizes + LARGEST - 1) // LARGEST
        self.owner = np.repeat(np.arange(len(sizes)), pieces)  # the requested row of bins of each row of bins here
        place = np.arange(len(self.owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        inner = starts[self.owner] + place * sizes[self.owner] // pieces[self.owner]
        self.edges: Integers = np.append(inner, starts[-1])
        self.shape = len(self.owner), len(columns) - 1

    @property
    def is_whole(self) -> bool:
        """Whether the bins are those requested: none is split, and each has rows."""
        return len(self.owner) == len(self.rows) - 1 and bool((self.owner[1:] > self.owner[:-1]).all())

    def allocate(self, planes: int) -> "tuple[Sums, Floats]":
        """Allocate the sums and maxima of the pictures of some planes, (planes, bins, bins)."""
        return np.zeros((planes, *self.shape)), np.zeros((planes, *self.shape), np.float32)

    def make_pictures(self, total: "Sums", most: "Floats") -> BinnedWeights:
        """Make the pictures of planes, (planes, ...), in the bins requested, from the sums and maxima."""
        if not self.is_whole:
            present, first = np.unique(self.owner, return_index=True)
            summed, largest = (np.zeros((len(x), len(self.rows) - 1, x.shape[2]), x.dtype) for x in (total, most))
            if len(present):
                summed[:, present] = np.add.reduceat(total, first, 1)
                largest[:, present] = np.maximum.reduceat(most, first, 1)
            total, most = summed, largest
        return BinnedWeights.from_sums(self.rows, self.columns, torch.from_numpy(total), torch.from_numpy(most))


def cover_keys(edges: Tensor, k: int) -> tuple[Tensor, slice]:
    """Return the edges of bins with one more on either side where they do not cover all k keys, and which bins were given."""
    before, after = edges.new_zeros(int(edges[0] > 0)), edges.new_full((int(edges[-1] < k),), k)
    return torch.cat([before, edges, after]), slice(len(before), len(before) + len(edges) - 1)
