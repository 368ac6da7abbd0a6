"""PairReader: batch n of sentence pairs, independent of what was read before; every epoch has each pair once."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.text.corpus.reader import NO_TARGET, check_reader, shuffle_places
from regard.text.pairs.pairs import PairSet

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PairBatch:
    """A batch of pairs: sources with their end tokens, the inputs of the decoder, and the targets with their end tokens.

    Shapes: sources (b, s), lengths (b,), before and targets (b, t), int64. Beyond the end of a sentence sources and before are
    0, and targets -100.
    """

    sources: Tensor
    lengths: Tensor
    before: Tensor
    targets: Tensor
    tokens: int  # of sources and targets in all ranks' shares, without padding


@dataclass(frozen=True, eq=False)
class PairReader:
    """The batches of a part in the order of a seed, or one rank's share of their rows.

    The length of a pair is that of its longer side with its end token. In each epoch pairs of equal length are shuffled among
    themselves; ordered by length they are cut into batches of as many pairs as have, padded, at most `tokens` tokens on that
    side, at least one pair; and the batches are shuffled. The cuts depend on lengths alone, so that every epoch has the same
    number of batches. The rows of a batch are distributed to `world` ranks in turn; if there are fewer rows than ranks, a rank
    without one gets the first row again, without targets.
    """

    part: PairSet
    tokens: int
    seed: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        check_reader(self, tokens=1, seed=0, rank=0, world=1)
        if not len(self.part):
            raise DataError(f"there is no sentence pair in {self.part!r}.")

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return len(self.batch_bounds) - 1

    def read(self, n: int) -> PairBatch:
        """Return batch n, counted from 0, also beyond the first epoch."""
        if n < 0:
            raise ConfigError(f"batches are counted from 0, got {n}.")
        epoch, place = divmod(n, self.batches)
        number = int(shuffle_places(np.array([place]), self.batches, self.seed, np.array([epoch]))[0])
        rows = self.shuffle_rows(np.arange(self.batch_bounds[number], self.batch_bounds[number + 1]), epoch)
        tokens = int(self.part.lengths[rows].sum()) + 2 * len(rows)
        mine = rows[self.rank :: self.world]
        if len(mine):
            return self.pad_batch(mine, tokens)
        first = self.pad_batch(rows[:1], tokens)
        return replace(first, targets=torch.full_like(first.targets, NO_TARGET))

    def shuffle_rows(self, places: Places, epoch: int) -> Places:
        """Return the pairs at places in the order by length, after pairs of equal length are shuffled."""
        found = np.empty_like(places)
        for length in np.unique(self.sorted_lengths[places]):
            start, stop = np.searchsorted(self.sorted_lengths, [length, length + 1])
            is_length = self.sorted_lengths[places] == length
            inside = places[is_length] - start
            found[is_length] = start + shuffle_places(inside, int(stop - start), self.seed, np.full_like(inside, epoch))
        return self.order[found]

    @cached_property
    def longest_sides(self) -> Places:
        """The length of each pair: that of its longer side, with the end token."""
        longer: Places = self.part.lengths.max(1) + 1
        return longer

    @cached_property
    def order(self) -> Places:
        """The indices of the pairs, sorted by length."""
        return np.argsort(self.longest_sides, kind="stable")

    @cached_property
    def sorted_lengths(self) -> Places:
        """The lengths of the pairs, sorted."""
        return self.longest_sides[self.order]

    @cached_property
    def batch_bounds(self) -> Places:
        """Where each batch begins in the order by length, and where the last one ends."""
        cuts, count = [0], len(self.sorted_lengths)
        while cuts[-1] < count:
            start = cuts[-1]
            some = self.sorted_lengths[start : start + self.tokens]  # a pair has at least one token
            room = some * np.arange(1, len(some) + 1)  # padded tokens of the batch that ends with each pair
            cuts.append(start + max(int(np.searchsorted(room, self.tokens, side="right")), 1))
        return np.array(cuts)

    def pad_batch(self, rows: Places, tokens: int) -> PairBatch:
        """Return the batch of these pairs."""
        end, lengths = self.part.text.end, self.part.lengths[rows] + 1
        sources = np.zeros((len(rows), lengths[:, 0].max()), np.int64)
        before = np.zeros((len(rows), lengths[:, 1].max()), np.int64)
        targets = np.full_like(before, NO_TARGET)
        for at, row in enumerate(rows.tolist()):
            source, target = self.part.get_sentence("source", row), self.part.get_sentence("target", row)
            sources[at, : len(source) + 1] = [*source, end]
            before[at, : len(target) + 1] = [end, *target]
            targets[at, : len(target) + 1] = [*target, end]
        one, count, two, three = map(torch.from_numpy, (sources, np.ascontiguousarray(lengths[:, 0]), before, targets))
        return PairBatch(one, count, two, three, tokens)
