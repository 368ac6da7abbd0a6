"""Reader: batch n of a corpus, independent of what was read before; every epoch has each token once."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.text.corpus.corpus import Corpus
from regard.text.corpus.shuffle import shuffle_places

NO_TARGET = -100  # the target of a place without one, ignored by torch's cross entropy


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a corpus: the tokens read, the next token of each as its target, and the document that each token belongs to.

    Shapes: all (b, t), int64. Beyond the end of the corpus, targets are -100, tokens 0 and documents -1.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor


def check_reader(reader: Any, **least: int) -> None:
    """Raise ConfigError unless a reader's numbers are whole and at least these, and its rank is below its world."""
    for name, number in least.items():
        value = getattr(reader, name)
        if not isinstance(value, int) or value < number:
            raise ConfigError(f"{name} must be a whole number of at least {number}, got {value!r}.")
    if reader.rank >= reader.world:
        raise ConfigError(f"rank is counted from 0 and below world, got rank={reader.rank}, world={reader.world}.")


@dataclass(frozen=True, eq=False)
class Reader:
    """The batches of a corpus in the order of a seed, or one rank's share of their rows.

    The tokens are cut into windows of `context` targets, so that each token but the very first is a target once an epoch.
    Windows are shuffled anew each epoch, and continue from one epoch to the next without a gap. Each of `world` ranks reads an
    equal share of the rows of a batch, in their order: the number of ranks does not change what is read.
    """

    corpus: Corpus
    batch: int
    context: int
    seed: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        check_reader(self, batch=1, context=1, seed=0, rank=0, world=1)
        if self.batch % self.world:
            raise ConfigError(f"batch must be a multiple of world, got batch={self.batch}, world={self.world}.")
        if self.corpus.tokens < 2:
            raise DataError("a corpus of one token has nothing to learn from: no token comes after another.")

    @property
    def windows(self) -> int:
        """The number of windows in an epoch."""
        return -(-(self.corpus.tokens - 1) // self.context)

    @property
    def batches(self) -> int:
        """The number of whole batches in an epoch, at least one."""
        return max(self.windows // self.batch, 1)

    def read(self, n: int) -> Batch:
        """Return batch n, counted from 0, also beyond the first epoch."""
        if n < 0:
            raise ConfigError(f"batches are counted from 0, got {n}.")
        rows = self.batch // self.world
        first = n * self.batch + self.rank * rows
        epochs, places = np.divmod(np.arange(first, first + rows, dtype=np.int64), self.windows)
        starts = shuffle_places(places, self.windows, self.seed, epochs) * self.context
        read = np.full((rows, self.context + 1), NO_TARGET, np.int64)
        for row, start in zip(read, starts.tolist(), strict=True):
            found = self.corpus[start : start + self.context + 1]
            row[: len(found)] = found
        tokens, targets = read[:, :-1], read[:, 1:]
        documents = self.corpus.find_documents(starts[:, None] + np.arange(self.context))
        documents[tokens == NO_TARGET] = -1
        return Batch(*map(torch.from_numpy, (np.maximum(tokens, 0), np.ascontiguousarray(targets), documents)))
