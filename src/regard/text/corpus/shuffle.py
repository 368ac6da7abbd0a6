"""A shuffle that is computed place by place, without a table; the same in every process and every version.

A Feistel network permutes the numbers below a power of four, keyed by seed and epoch; a result that is not below the count is
permuted again until it is. Source: Black and Rogaway 2002, Ciphers with arbitrary finite domains.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
ROUNDS = 8
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio


def shuffle_places(places: NDArray[np.int64], count: int, seed: int, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each place below count goes in its epoch's shuffle, which is a permutation."""
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
