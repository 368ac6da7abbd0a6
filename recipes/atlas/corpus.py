"""English texts of two kinds for the atlas of a general model, about a million tokens: encyclopedia articles and literature."""

import re
from collections.abc import Iterator
from pathlib import Path

from regard.atomic_write import write_atomically
from regard.errors import DataError
from regard.text.byte_pair import END

PLAYS = ("tinyshakespeare.txt", "the-verdict.txt")  # Shakespeare; The Verdict, Edith Wharton, 1908; public domain
ARTICLES = ("wiki.test.raw", "wiki.valid.raw")  # WikiText-2, from Wikipedia, CC BY-SA 3.0
TITLE = re.compile(r"^ = [^=\n]+ = $", re.MULTILINE)


def write_corpus(data: Path, folder: Path) -> None:
    """Write the texts in a folder as files whose documents are separated by <|endoftext|>. Raises DataError if one is missing.

    A document is an article of WikiText-2, or a whole file of the others.
    """
    found = {name: find_file(data, name) for name in (*PLAYS, *ARTICLES)}
    folder.mkdir(parents=True, exist_ok=True)
    with write_atomically(*(folder / f"{Path(name).stem}.txt" for name in found)) as places:
        for (name, path), place in zip(found.items(), places, strict=True):
            text = path.read_text(encoding="utf-8")
            documents = split_articles(text) if name in ARTICLES else iter([text])
            place.write_text(f"\n{END}\n".join(documents), encoding="utf-8")


def find_file(data: Path, name: str) -> Path:
    """Return the path of a file in a folder or its subfolders. Raises DataError if there is none."""
    found = sorted(data.rglob(name))
    if not found:
        raise DataError(f"{data} has no {name}, nor a subfolder that has: the texts are {', '.join((*PLAYS, *ARTICLES))}.")
    return found[0]


def split_articles(text: str) -> Iterator[str]:
    """Yield the articles of WikiText, each from its title to the next."""
    starts = [match.start() for match in TITLE.finditer(text)]
    for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
        yield text[start:stop].rstrip()
