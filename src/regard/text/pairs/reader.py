"""PairReader: batch n of sentence pairs, whatever was read before, in every epoch each pair once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.text.corpus.order import shuffled
from regard.text.corpus.reader import NONE
from regard.text.pairs.stored import Part

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Batch:
    """Some pairs: sources with their ends, what each word of a target comes after, and the words themselves with their end.

    Shapes: sources (b, s), lengths (b,), before and targets (b, t), int64. Beyond a sentence sources and before are 0, and
    targets -100.
    """

    sources: Tensor
    lengths: Tensor
    before: Tensor
    targets: Tensor
    tokens: int  # of sources and targets in all ranks' shares, padding left out


@dataclass(frozen=True, eq=False)
class PairReader:
    """The batches of a part in the order of a seed, or of them one rank's share of the rows.

    A pair is as long as its longer side with its end. Pairs of a length are shuffled among themselves in each epoch; put in a
    row by length they are cut into batches, of as many pairs as have, padded, `tokens` tokens on that side or fewer, one pair
    at least; and the batches are shuffled. Where a cut is made depends on lengths alone, and so an epoch has always as many
    batches. Of a batch, world ranks have shares of the rows in turn; where there are fewer rows than ranks, a rank without one
    has the first row once more, with nothing to foretell.
    """

    part: Part
    tokens: int
    seed: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("seed", 0), ("rank", 0), ("world", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.rank >= self.world:
            raise ConfigError(f"rank is counted from 0 and below world, got rank={self.rank}, world={self.world}.")
        if not len(self.part):
            raise DataError(f"there is no sentence pair in {self.part!r}.")

    @property
    def batches(self) -> int:
        """How many batches an epoch has."""
        return len(self.cuts) - 1

    def read(self, n: int) -> Batch:
        """Batch n, from 0 on, past the first epoch too."""
        if n < 0:
            raise ConfigError(f"batches are counted from 0, got {n}.")
        epoch, place = divmod(n, self.batches)
        number = int(shuffled(np.array([place]), self.batches, self.seed, np.array([epoch]))[0])
        rows = self.rows(np.arange(self.cuts[number], self.cuts[number + 1]), epoch)
        tokens = int(self.part.lengths[rows].sum()) + 2 * len(rows)
        mine = rows[self.rank :: self.world]
        return self.padded(mine, tokens) if len(mine) else hidden(self.padded(rows[:1], tokens))

    def rows(self, places: Places, epoch: int) -> Places:
        """The pairs at places of the row of all, after those of each length were shuffled."""
        found = np.empty_like(places)
        for length in np.unique(self.sizes[places]):
            start, stop = np.searchsorted(self.sizes, [length, length + 1])
            here = self.sizes[places] == length
            inside = places[here] - start
            found[here] = start + shuffled(inside, int(stop - start), self.seed, np.full_like(inside, epoch))
        return self.order[found]

    @cached_property
    def longer(self) -> Places:
        """The length of each pair: that of its longer side, with the end."""
        longer: Places = self.part.lengths.max(1) + 1
        return longer

    @cached_property
    def order(self) -> Places:
        """The pairs by length."""
        return np.argsort(self.longer, kind="stable")

    @cached_property
    def sizes(self) -> Places:
        """The lengths in that order."""
        return self.longer[self.order]

    @cached_property
    def cuts(self) -> Places:
        """Where each batch begins in that order, and where the last one ends."""
        cuts, count = [0], len(self.sizes)
        while cuts[-1] < count:
            start = cuts[-1]
            some = self.sizes[start : start + self.tokens]  # a pair has a token at least
            room = some * np.arange(1, len(some) + 1)  # the padded tokens of a batch up to each pair
            cuts.append(start + max(int(np.searchsorted(room, self.tokens, side="right")), 1))
        return np.array(cuts)

    def padded(self, rows: Places, tokens: int) -> Batch:
        """The batch of these pairs."""
        end, lengths = self.part.text.end, self.part.lengths[rows] + 1
        sources = np.zeros((len(rows), lengths[:, 0].max()), np.int64)
        before = np.zeros((len(rows), lengths[:, 1].max()), np.int64)
        targets = np.full_like(before, NONE)
        for at, row in enumerate(rows.tolist()):
            source, target = self.part.sentence("source", row), self.part.sentence("target", row)
            sources[at, : len(source) + 1] = [*source, end]
            before[at, : len(target) + 1] = [end, *target]
            targets[at, : len(target) + 1] = [*target, end]
        one, count, two, three = map(torch.from_numpy, (sources, np.ascontiguousarray(lengths[:, 0]), before, targets))
        return Batch(one, count, two, three, tokens)


def hidden(batch: Batch) -> Batch:
    """The batch with nothing to foretell."""
    return Batch(batch.sources, batch.lengths, batch.before, torch.full_like(batch.targets, NONE), batch.tokens)
