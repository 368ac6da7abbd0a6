"""A corpus: texts as tokens on disk, prepared once, and a reader that returns any batch without reading those before it."""

from regard.text.corpus.corpus import Corpus
from regard.text.corpus.prepare import prepare
from regard.text.corpus.reader import Reader, TokenBatch
from regard.text.corpus.sources import documents

__all__ = ["Corpus", "Reader", "TokenBatch", "documents", "prepare"]
