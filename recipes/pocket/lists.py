"""Lists of repeated words between stories: text from which induction heads form.

How a list continues can be predicted only from its earlier copy: an induction head finds the same word there and attends to
what followed it, with the help of a head in an earlier layer that attends to the previous token (Olsson et al. 2022).
"""

import random
from collections.abc import Iterator
from pathlib import Path

from recipes.pocket.stories import get_chunk_path
from regard.text import BytePair
from regard.text.corpus import documents

SEED = 30_000
WORDS, TIMES = (8, 100), (2, 4)  # words in a list, and how often it is repeated, from one to the other
PLAIN = 0.25  # the share of the last chunk, its last stories, without lists: some of them are held out


def insert_lists(folder: Path, text: BytePair, chunks: range, *, every: int) -> Iterator[str]:
    """Yield the stories of chunks with a list after every so many; the last stories without."""
    generator, words = random.Random(SEED), list_whole_words(text)
    for n in chunks:
        stories = list(documents(get_chunk_path(folder, n)))
        mixed = round(len(stories) * (1 - PLAIN)) if n == chunks[-1] else len(stories)
        for number, story in enumerate(stories[:mixed]):
            yield story
            if number % every == 0:
                yield make_list(words, generator)
        yield from stories[mixed:]


def make_list(words: list[str], generator: random.Random) -> str:
    """Return random words, repeated."""
    return "".join(generator.choices(words, k=generator.randint(*WORDS)) * generator.randint(*TIMES))


def list_whole_words(text: BytePair) -> list[str]:
    """Return the pieces of a vocabulary that are a space and a word."""
    pieces = text.pieces(range(text.vocabulary))
    return [piece for n, piece in enumerate(pieces) if piece[0] == " " and piece[1:].isalpha() and text.encode(piece) == [n]]
