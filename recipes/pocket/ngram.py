"""An n-gram model with interpolated, modified Kneser-Ney smoothing: what counting alone achieves.

Source: Chen and Goodman 1998, section 3. An n-gram is one int64, its first token in the highest bits, so that those with one
history stand together when they are sorted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Order:
    """The n-grams of one length: how often each was seen, and the share that their histories leave for other words."""

    grams: Integers  # sorted
    probabilities: Floats  # (count - discount) / the history's total, of each
    histories: Integers  # sorted
    remainder: Floats  # of each history, the share that goes to the next shorter one


@dataclass(frozen=True)
class KneserNey:
    """p(w | h) = max(count - D, 0) / total + remainder p(w | h without its first word), down to 1 / vocabulary."""

    orders: tuple[Order, ...]  # from single words on
    vocabulary: int

    @classmethod
    def train(cls, tokens: NDArray[Any], n: int, vocabulary: int) -> "KneserNey":
        """Counts of the longest n-grams; of each shorter one, how many different words stood before it."""
        bits = count_bits(vocabulary, n)
        grams, counts = np.unique(pack_ngrams(tokens, n, bits), return_counts=True)
        orders = [count_order(grams, counts, bits)]
        for shorter in range(n - 1, 0, -1):
            grams, counts = np.unique(grams & ((1 << bits * shorter) - 1), return_counts=True)
            orders.append(count_order(grams, counts, bits))
        return cls(tuple(reversed(orders)), vocabulary)

    def compute_mean_nats(self, tokens: NDArray[Any]) -> float:
        """The mean of -log p of every token that has a whole history before it."""
        n = len(self.orders)
        bits = count_bits(self.vocabulary, n)
        whole = pack_ngrams(tokens, n, bits)
        p = np.full(len(whole), 1 / self.vocabulary)
        for length, one in enumerate(self.orders, 1):
            grams = whole & ((1 << bits * length) - 1)
            remainder, known = look_up_values(one.histories, one.remainder, grams >> bits)
            p = np.where(known, look_up_values(one.grams, one.probabilities, grams)[0] + remainder * p, p)
        return float(-np.log(p).mean())


def count_bits(vocabulary: int, n: int) -> int:
    """Bits that a token takes."""
    bits = (vocabulary - 1).bit_length()
    assert bits * n < 64, f"{n} tokens of {bits} bits do not fit in a number"
    return bits


def pack_ngrams(tokens: NDArray[Any], n: int, bits: int) -> Integers:
    """Every n tokens in a row as one number."""
    wide = tokens.astype(np.int64)
    whole = np.zeros(len(wide) - n + 1, np.int64)
    for place in range(n):
        whole = (whole << bits) | wide[place : len(wide) - n + 1 + place]
    return whole


def count_order(grams: Integers, counts: Integers, bits: int) -> Order:
    """Counts less their discounts, of which the histories make what they leave."""
    once, twice, thrice, four = (float((counts == n).sum()) for n in (1, 2, 3, 4))
    y = once / max(once + 2 * twice, 1)
    steps = [0.0, 1 - 2 * y * twice / max(once, 1), 2 - 3 * y * thrice / max(twice, 1), 3 - 4 * y * four / max(thrice, 1)]
    discounts = np.clip(np.array(steps), 0, [0, 1, 2, 3])[np.minimum(counts, 3)]
    histories, begins = np.unique(grams >> bits, return_index=True)
    totals, taken = np.add.reduceat(counts, begins), np.add.reduceat(discounts, begins)
    owner = np.repeat(np.arange(len(histories)), np.diff(np.append(begins, len(grams))))
    return Order(grams, (counts - discounts) / totals[owner], histories, taken / totals)


def look_up_values(keys: Integers, values: Floats, queries: Integers) -> tuple[Floats, NDArray[np.bool_]]:
    """The value of each key that is queries for, 0 where there is none; and whether there is one."""
    at = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    known = keys[at] == queries
    return np.where(known, values[at], 0.0), known
