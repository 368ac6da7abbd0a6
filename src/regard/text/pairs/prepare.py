"""Prepare sentence pairs: split them into parts, learn a vocabulary from the training part, and write tokens to disk.

A pair that no file assigns to a part goes to the part of the same source sentence, ignoring case and punctuation, if a file
assigns that. Otherwise the sentence is hashed to a number from 0 to 1: below `test` it goes to the test part, in the next
`valid` to the valid part, else to the training part. So all translations of a sentence, however it is written, are in one part,
whatever else the file contains.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from regard.errors import ConfigError, DataError
from regard.text.byte_pair import BytePair
from regard.text.corpus.columns import Column, ColumnWriter
from regard.text.corpus.prepare import choose_dtype
from regard.text.pairs.pairs import COLUMNS, Pairs, PairsIndex
from regard.text.pairs.sources import PARTS, SentencePair, read_pairs
from regard.text.prepared_folder import compute_tokenizer_checksums, replace_folder

LANGUAGES = ("en", "fr")
BLOCK = 4096  # pairs encoded and written at a time
WORDS = re.compile(r"\w+")


def prepare(
    source: str | Path | Sequence[str | Path],
    folder: str | Path,
    *,
    vocabulary: int | BytePair = 4000,
    languages: tuple[str, str] = LANGUAGES,
    valid: float = 0.01,
    test: float = 0.01,
) -> Pairs:
    """Write the sentence pairs of one or several sources, in three parts: see the module.

    regard.text.pairs.sources describes the sources. vocabulary is the number of pieces to learn, from both sides of the
    training part, or an existing encoding. languages are the suffixes of aligned files. valid and test are the shares of the
    sentences that no file assigns to a part. A former folder of pairs is replaced, any other is refused.
    """
    check_settings(languages, valid, test)
    sources = [source] if isinstance(source, str | Path) else list(source)
    found = [one for path in sources for one in read_pairs(path, languages)]
    parts: dict[str, list[SentencePair]] = {name: [] for name in PARTS}
    for name, one in split_pairs(found, valid, test):
        parts[name].append(one)
    if not parts["train"]:
        raise DataError(f"there is no sentence pair to train on in {', '.join(map(str, sources))}.")
    sides = (side for one in parts["train"] for side in (one.source, one.target))
    text = vocabulary if isinstance(vocabulary, BytePair) else BytePair.train(sides, vocabulary)
    with replace_folder(Path(folder), PairsIndex.list_files) as partial:
        text.save(partial)
        columns = {name: write_part(partial, name, some, text) for name, some in parts.items()}
        rule = f"as the files say, else by the sentence's hash: test below {test:g}, valid below {test + valid:g}"
        PairsIndex(text.vocabulary, rule, columns, compute_tokenizer_checksums(partial)).write(partial)
    return Pairs.load(folder)


def check_settings(languages: tuple[str, str], valid: float, test: float) -> None:
    """Raise ConfigError for invalid languages or shares."""
    if len(languages) != 2 or languages[0] == languages[1]:
        raise ConfigError(f"languages must be two different file endings, for example en and fr; got {languages!r}.")
    if min(valid, test) < 0 or valid + test >= 1:
        raise ConfigError(f"valid and test are shares, together below 1; got valid={valid!r}, test={test!r}.")


def write_part(folder: Path, name: str, pairs: Sequence[SentencePair], text: BytePair) -> dict[str, Column]:
    """Write the columns of a part."""
    growing = {one: ColumnWriter(folder / f"{name}.{one}.npy", dtype or choose_dtype(text)) for one, dtype in COLUMNS.items()}
    try:
        ends = {"source": 0, "target": 0}
        for side in ends:
            growing[f"{side}-starts"].append(np.zeros(1, np.int64))
        for start in range(0, len(pairs), BLOCK):
            some = pairs[start : start + BLOCK]
            for side in ends:
                ids = [text.encode(getattr(one, side)) for one in some]
                sums = ends[side] + np.cumsum([len(one) for one in ids])
                growing[side].append(np.concatenate(ids))
                growing[f"{side}-starts"].append(sums)
                ends[side] = int(sums[-1])
            growing["words"].append(np.array([max(len(one.source.split()), len(one.target.split())) for one in some]))
        return {one: column.close() for one, column in growing.items()}
    finally:
        for column in growing.values():
            column.abandon()


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
    normalized = unicodedata.normalize("NFKC", sentence).casefold()
    return " ".join(WORDS.findall(normalized)) or normalized
