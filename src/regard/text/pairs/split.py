"""Which part a pair is of: the one that a folder of files gives it to, else one that the sentence itself decides.

The rule, for pairs that no file gives to a part: the source sentence, without case and signs, is looked up among those that
are given to one, and goes there; else its hash is a number from 0 to 1: below `test` it goes to the test part, in the next
`valid` to the valid part, and to the training part otherwise. So all translations of a sentence, however it is
written, are in one part, whatever else lies in the file.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence

from regard.text.pairs.sources import PARTS, Given

WORDS = re.compile(r"\w+")


def divided(pairs: Sequence[Given], valid: float, test: float) -> Iterator[tuple[str, Given]]:
    """Each pair, and the part that it is of."""
    known = placed(pairs)
    for one in pairs:
        sentence = normalised(one.source)
        yield one.part or known.get(sentence) or drawn(sentence, valid, test), one


def placed(pairs: Sequence[Given]) -> dict[str, str]:
    """The part of each sentence that a file gives to one; where several do, test before valid before train."""
    found: dict[str, str] = {}
    for part in PARTS:
        found |= {normalised(one.source): part for one in pairs if one.part == part}
    return found


def drawn(sentence: str, valid: float, test: float) -> str:
    """The part of a sentence that is given to none."""
    share = int.from_bytes(hashlib.blake2b(sentence.encode(), digest_size=8).digest(), "big") / 2**64
    return "test" if share < test else "valid" if share < test + valid else "train"


def normalised(sentence: str) -> str:
    """The words of a sentence: compatible forms made one, without case and signs; the sentence itself where it has no word."""
    plain = unicodedata.normalize("NFKC", sentence).casefold()
    return " ".join(WORDS.findall(plain)) or plain
