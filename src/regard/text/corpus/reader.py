"""Reader: batch n of a corpus, independent of what was read before; every epoch has each token once."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.text.corpus.corpus import Corpus

Words = NDArray[np.uint64]
NO_TARGET = -100  # the target of a place without one, ignored by torch's cross entropy
ROUNDS = 8  # of the shuffle
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio


@dataclass(frozen=True, eq=False)
class TokenBatch:
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

    def read(self, n: int) -> TokenBatch:
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
        return TokenBatch(*map(torch.from_numpy, (np.maximum(tokens, 0), np.ascontiguousarray(targets), documents)))


@dataclass(frozen=True, eq=False)
class EpochReader(Reader):
    """The batches of one epoch, in which each token is a target once; rows of the last batch beyond it have no target."""

    @property
    def batches(self) -> int:
        """The number of batches in an epoch, the last of which may be incomplete."""
        return -(-self.windows // self.batch)

    def read(self, n: int) -> TokenBatch:
        """Return batch n, counted from 0."""
        found, rows = super().read(n), self.batch // self.world
        beyond = torch.arange(rows) + n * self.batch + self.rank * rows >= self.windows
        return replace(found, targets=found.targets.masked_fill(beyond.unsqueeze(-1), NO_TARGET))


def shuffle_places(places: NDArray[np.int64], count: int, seed: int, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each place below count goes in its epoch's shuffle, which is a permutation; no table is made of it.

    A Feistel network permutes the numbers below a power of four, keyed by seed and epoch; a result that is not below the count
    is permuted again until it is. Source: Black and Rogaway 2002, Ciphers with arbitrary finite domains.
    """
    half = max((count - 1).bit_length() + 1, 2) // 2
    keys = mix_bits(mix_bits(np.full(places.shape, seed, np.uint64)) + epochs.astype(np.uint64))
    found = permute_bits(places.astype(np.uint64), half, keys)
    while (outside := found >= count).any():
        found[outside] = permute_bits(found[outside], half, keys[outside])
    return found.astype(np.int64)


def permute_bits(words: Words, half: int, keys: Words) -> Words:
    """Permute numbers of 2 * half bits."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = words >> width, words & mask
    for n in range(1, ROUNDS + 1):
        step = np.full(words.shape, n, np.uint64) * GOLDEN
        left, right = right, left ^ (mix_bits(right + mix_bits(keys + step)) >> np.uint64(64 - half))
    return left << width | right


def mix_bits(words: Words) -> Words:
    """Mix bits so that each depends on all: the last steps of splitmix64 (Steele, Lea and Flood 2014)."""
    words = words + GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
