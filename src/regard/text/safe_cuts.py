"""Places where a text can be cut without changing its tokens, and limits of long runs in texts that merges are learned from."""

import re
from collections.abc import Iterable, Iterator

LONGEST, MOST = 1 << 10, 1 << 22  # most characters of one run, and of all longer runs together
CONTRACTION = re.compile(r"'(?:[sdmt]|ll|ve|re)")
SPACES = " \t\r\n"
WHITE = re.compile(rf"\s{{{LONGEST + 1}}}")
RUN = re.compile("|".join(rf"{kind}{{{LONGEST + 1},}}" for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")))


def limit_runs(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts to learn merges from, with long runs of one kind of character in parts of LONGEST, at most MOST in total.

    A trainer keeps each run in one piece, and goes through it for every merge.
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


def is_safe_cut(text: str, place: int) -> bool:
    """Return whether PATTERN splits both parts of a text as it splits the whole, given that a piece or part of one ends there.

    White space before the place could form one piece with what follows, as could an apostrophe with the letters after it.
    """
    before = text[place - 1]
    if before.isspace() and not (before in SPACES and text[place] in SPACES and text[place + 1 : place + 2] in SPACES):
        return False
    for found in CONTRACTION.finditer(text, max(place - 2, 0), place + 3):
        if found.start() < place < found.end() or (found.start() == place and not before.isalnum()):
            return False
    return True
