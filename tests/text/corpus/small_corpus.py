"""Small corpora, and what lies in a folder."""

from pathlib import Path

from regard.text import Letters
from regard.text.corpus import Corpus, prepare

LETTERS = Letters("abcdefg ")


def corpus(folder: Path, texts: list[str], shard: int = 7) -> Corpus:
    """A corpus of letters in one process."""
    return prepare(texts, LETTERS, folder / "corpus", shard=shard, workers=1)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
