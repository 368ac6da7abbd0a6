"""The words along the axes of a map: those of the recording, or their numbers; and where a word that is asked for stands."""

import re
from collections.abc import Sequence

from regard.errors import ConfigError
from regard.observe import Recording
from regard.observe.recording import KINDS
from regard.observe.words import MARKS, TwoTexts, Words

Sides = tuple[list[str], list[str]]
Size = tuple[int, int]
SOME = 6  # words of the text that an error names
BYTES = re.compile(r"(?:\\x[0-9a-f]{2})+|\ufffd")  # of half a character, as the texts of tokens write it


def attention_of(recording: Recording, asked: str | None = None) -> str:
    """What is shown, self or cross: what is asked for; else self attention, or cross where there is nothing else.

    Raises ConfigError where there is none of what is asked for.
    """
    there = [kind for kind in KINDS if recording.layers(kind)]
    if asked is None or asked in there:
        return asked or (there or KINDS)[0]
    raise ConfigError(f"there is no {asked} attention in this recording; there is {' and '.join(there) or 'none at all'}.")


def words_of(recording: Recording, row: int, count: int) -> list[str]:
    """Words for the keys: those of the recording, or their numbers."""
    return fitting(recording.tokens, row, count)


def fitting(words: Words | None, row: int, count: int) -> list[str]:
    """The words of a batch row where there are so many, else numbers."""
    found: Sequence[object] = () if words is None else words
    if len(found) and not isinstance(found[0], str):
        found = found[row]  # type: ignore[assignment]
    return [str(word) for word in found] if len(found) == count else [str(n) for n in range(count)]


def sides_of(recording: Recording, layer: int | str, kind: str, part: str | None, row: int, size: Size) -> Sides:
    """Words for the queries and for the keys of a layer, of which there are so many, or their numbers.

    Queries of cross attention are another text's; others are the last of their keys.
    """
    asking, answering = recording.words(layer, kind, part)
    keys = fitting(answering, row, size[1])
    if kind == "cross":
        return fitting(asking if isinstance(recording.tokens, TwoTexts) else None, row, size[0]), keys
    return keys[size[1] - size[0] :], keys


def byte_note(words: Sequence[str]) -> str | None:
    """What is to be said where letters were cut into bytes; None where each word is text."""
    part = next((found[0] for found in map(BYTES.search, words) if found), None)
    return part and f"Letters that the model has no tokens for are read byte by byte, and written like {part}."


def place_of(asked: str, words: Sequence[str]) -> tuple[int, list[int]]:
    """Where a word stands, the last of its places, and all of them: of a word of several tokens, where its last one stands.

    What is no word of the text is a number of a token, from 0 on; from the end where it is below 0. Raises ConfigError where
    it is neither.
    """
    sought = asked.strip()
    places = [n for n, word in enumerate(words) if bare(word) == sought] or spelled(sought, words)
    if sought and places:
        return places[-1], places
    try:
        number = range(len(words))[int(asked)]
    except (ValueError, IndexError):
        some = list(dict.fromkeys(bare(word) for word in words if bare(word)))[:SOME]
        raise ConfigError(
            f"{asked!r} is no word of the text and no number from 0 to {len(words) - 1}. "
            f"Its words begin {', '.join(map(repr, some))}."
        ) from None
    return number, [number]


def spelled(asked: str, words: Sequence[str]) -> list[int]:
    """The tokens that end a word of several tokens."""
    text, places, found = "".join(words), [], 0
    for n, word in enumerate(words):
        places += [n] * len(word)  # of each character, the token it lies in
    starts = []
    while asked and (found := text.find(asked, found)) >= 0:
        starts.append(found)
        found += 1
    return [
        places[start + len(asked) - 1]
        for start in starts
        if not text[start - 1 : start].isalnum() and not text[start + len(asked) : start + len(asked) + 1].isalnum()
    ]


def bare(word: str) -> str:
    """A token without the marks of white space around it."""
    return word.strip(MARKS).removeprefix("##")
