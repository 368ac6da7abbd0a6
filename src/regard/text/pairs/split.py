"""The split of sentence pairs into parts: given by the name of a file, else determined by the sentence itself.

A pair that no file assigns to a part goes to the part of the same source sentence, ignoring case and punctuation, if a file
assigns that. Otherwise the sentence is hashed to a number from 0 to 1: below `test` it goes to the test part, in the next
`valid` to the valid part, else to the training part. So all translations of a sentence, however it is written, are in one part,
whatever else the file contains.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence

from regard.text.pairs.sources import PARTS, SentencePair

WORDS = re.compile(r"\w+")


def split_pairs(pairs: Sequence[SentencePair], valid: float, test: float) -> Iterator[tuple[str, SentencePair]]:
    """Yield the part that each pair belongs to, with the pair."""
    known = map_sentences_to_parts(pairs)
    for one in pairs:
        sentence = normalize_sentence(one.source)
        yield one.part or known.get(sentence) or choose_part(sentence, valid, test), one


def map_sentences_to_parts(pairs: Sequence[SentencePair]) -> dict[str, str]:
    """Return the part of each sentence that a file assigns to one; if several files do, test wins over valid over train."""
    found: dict[str, str] = {}
    for part in PARTS:
        found |= {normalize_sentence(one.source): part for one in pairs if one.part == part}
    return found


def choose_part(sentence: str, valid: float, test: float) -> str:
    """Return the part of a sentence that no file assigns to one, by its hash."""
    share = int.from_bytes(hashlib.blake2b(sentence.encode(), digest_size=8).digest(), "big") / 2**64
    return "test" if share < test else "valid" if share < test + valid else "train"


def normalize_sentence(sentence: str) -> str:
    """Return the words of a sentence in compatibility form, without case and punctuation; the sentence if it has none."""
    plain = unicodedata.normalize("NFKC", sentence).casefold()
    return " ".join(WORDS.findall(plain)) or plain
