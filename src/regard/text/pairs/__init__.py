"""Sentence pairs: sentences and their translations as tokens on disk, in three parts, and a reader of batches by length."""

from regard.text.pairs.pairs import Pairs, PairSet
from regard.text.pairs.prepare import prepare
from regard.text.pairs.reader import PairBatch, PairReader

__all__ = ["PairBatch", "PairReader", "PairSet", "Pairs", "prepare"]
