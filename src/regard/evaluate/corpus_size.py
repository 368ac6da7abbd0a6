"""The numbers of words and bytes of a corpus, counted from its tokens."""

import codecs

from regard.text.byte_pair import END
from regard.text.corpus import Corpus

BLOCK = 1 << 16  # tokens decoded at a time


def count_words_and_bytes(corpus: Corpus) -> tuple[int, int]:
    """Count the words, between white space, and the bytes of a corpus's text.

    The ends of documents are no text, and end words.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    end = corpus.text.bytes([corpus.text.special[END]]) if END in corpus.text.special else None
    words, count, inside = 0, 0, False  # inside: whether the text so far ends within a word
    for start in range(0, corpus.tokens, BLOCK):
        ids = corpus[start : start + BLOCK]
        ends = int((ids == corpus.text.special[END]).sum()) if end else 0
        data = corpus.text.bytes(ids.tolist())
        count += len(data) - ends * len(end or b"")
        text = decoder.decode(data.replace(end, b"\n") if end else data)
        words += len(text.split()) - (inside and text[:1].strip() != "")
        inside = text[-1:].strip() != "" if text else inside
    return words, count
