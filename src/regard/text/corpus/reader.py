"""Reader: batch n of a corpus, whatever was read before, in every epoch each token once."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.text.corpus.order import shuffled
from regard.text.corpus.shards import Corpus

NONE = -100  # the target of a place that has none, which torch's cross entropy leaves out


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a corpus: what is read, what comes next, and which document each token that is read is of.

    Shapes: all (b, t), int64. Where the corpus ended, targets are -100, tokens 0 and documents -1.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor


@dataclass(frozen=True, eq=False)
class Reader:
    """The batches of a corpus in the order of a seed, or of them one rank's share of the rows.

    The tokens are cut into windows of `context` targets, so that each but the very first, which nothing precedes, is a target
    once an epoch. Windows are shuffled anew each epoch, and follow one another through the epochs without a gap. Of a batch,
    world ranks have equal shares of the rows, in their order: how many there are changes nothing of what is read.
    """

    corpus: Corpus
    batch: int
    context: int
    seed: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("context", 1), ("seed", 0), ("rank", 0), ("world", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.rank >= self.world:
            raise ConfigError(f"rank is counted from 0 and below world, got rank={self.rank}, world={self.world}.")
        if self.batch % self.world:
            raise ConfigError(f"batch must be a multiple of world, got batch={self.batch}, world={self.world}.")
        if self.corpus.tokens < 2:
            raise DataError("a corpus of one token has nothing to learn from: no token comes after another.")

    @property
    def windows(self) -> int:
        """How many windows an epoch has."""
        return -(-(self.corpus.tokens - 1) // self.context)

    @property
    def batches(self) -> int:
        """How many whole batches an epoch has, one at least."""
        return max(self.windows // self.batch, 1)

    def read(self, n: int) -> Batch:
        """Batch n, from 0 on, past the first epoch too."""
        if n < 0:
            raise ConfigError(f"batches are counted from 0, got {n}.")
        rows = self.batch // self.world
        first = n * self.batch + self.rank * rows
        epochs, places = np.divmod(np.arange(first, first + rows, dtype=np.int64), self.windows)
        starts = shuffled(places, self.windows, self.seed, epochs) * self.context
        read = np.full((rows, self.context + 1), NONE, np.int64)
        for row, start in zip(read, starts.tolist(), strict=True):
            found = self.corpus[start : start + self.context + 1]
            row[: len(found)] = found
        tokens, targets = read[:, :-1], read[:, 1:]
        documents = self.corpus.document_of(starts[:, None] + np.arange(self.context))
        documents[tokens == NONE] = -1
        return Batch(*map(torch.from_numpy, (np.maximum(tokens, 0), np.ascontiguousarray(targets), documents)))
