"""Sentence pairs: sentences and their translations as tokens on disk, in three parts, and a reader of batches by length."""

from regard.text.pairs.prepare import prepare
from regard.text.pairs.reader import Batch, PairReader
from regard.text.pairs.stored import Pairs, Part

__all__ = ["Batch", "PairReader", "Pairs", "Part", "prepare"]
