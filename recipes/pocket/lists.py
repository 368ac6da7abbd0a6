"""The second corpus: stories, and between them lists of words said again and again, from which heads learn to look back.

How a list goes on, only its earlier turn tells: a head that finds the word before and reads what came after it, an induction
head, which needs one in an earlier layer that looks at the previous token (Olsson et al. 2022).
"""

import random
from collections.abc import Iterator
from pathlib import Path

from recipes.pocket.stories import place
from regard.text import BytePair
from regard.text.corpus import documents

SEED = 30_000
WORDS, TIMES = (8, 100), (2, 4)  # of a list, from one to the other
EVERY = 2  # stories, and a list after the first of them
PLAIN = 0.25  # of the last chunk, the last stories, have no list between them: some of them are held out


def mixed(folder: Path, text: BytePair, chunks: range) -> Iterator[str]:
    """The stories of chunks, after every so many a list; the last ones without."""
    dice, known = random.Random(SEED), whole_words(text)
    for n in chunks:
        stories = list(documents(place(folder, n)))
        among = round(len(stories) * (1 - PLAIN)) if n == chunks[-1] else len(stories)
        for number, story in enumerate(stories[:among]):
            yield story
            if number % EVERY == 0:
                yield listed(known, dice)
        yield from stories[among:]


def listed(known: list[str], dice: random.Random) -> str:
    """Words at random, and the same words again."""
    return "".join(dice.choices(known, k=dice.randint(*WORDS)) * dice.randint(*TIMES))


def whole_words(text: BytePair) -> list[str]:
    """The pieces of a vocabulary that are a space and a word."""
    pieces = text.pieces(range(text.vocabulary))
    return [piece for n, piece in enumerate(pieces) if piece[0] == " " and piece[1:].isalpha() and text.encode(piece) == [n]]
