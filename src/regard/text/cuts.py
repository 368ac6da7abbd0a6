"""Places where a text can be cut and its tokens stay those of the whole; and runs that are cut to learn pairs from."""

import re
from collections.abc import Iterable, Iterator

LONGEST, MOST = 1 << 10, 1 << 22  # characters: of a run that pairs are learned from, and of all longer ones together
CONTRACTION = re.compile(r"'(?:[sdmt]|ll|ve|re)")
SPACES = " \t\r\n"
WHITE = re.compile(rf"\s{{{LONGEST + 1}}}")
RUN = re.compile("|".join(rf"{kind}{{{LONGEST + 1},}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))


def limit_runs(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts to learn pairs from, long runs of a kind of characters in parts of LONGEST, and not more than MOST of them.

    A trainer keeps each run whole, and goes through it at every pair.
    """
    left = MOST
    for text in texts:
        at = 0
        if max(map(len, text.split()), default=0) > LONGEST or WHITE.search(text):
            for found in RUN.finditer(text):
                yield text[at : found.start()]
                run, at = found[0][:left], found.end()
                left -= len(run)
                yield from (run[start : start + LONGEST] for start in range(0, len(run), LONGEST))
        yield text[at:]


def is_cut(text: str, place: int) -> bool:
    """Return whether both parts of a text are cut by PATTERN as the whole is, given that a piece, or part of one, ends there.

    White space before the place could be one piece with what follows; an apostrophe with the letters after it.
    """
    before = text[place - 1]
    if before.isspace() and not (before in SPACES and text[place] in SPACES and text[place + 1 : place + 2] in SPACES):
        return False
    for found in CONTRACTION.finditer(text, max(place - 2, 0), place + 3):
        if found.start() < place < found.end() or (found.start() == place and not before.isalnum()):
            return False
    return True
