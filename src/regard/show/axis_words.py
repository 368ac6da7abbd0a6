"""The words along the axes of a map, or their indices, and the position of a word given by its text or number."""

import re
from collections.abc import Sequence

from regard.errors import ConfigError
from regard.observe import Recording
from regard.observe.recorded_runs.run import IMPLICIT, KINDS
from regard.observe.recorded_runs.words import MARKS, Words

AxisWords = tuple[list[str], list[str]]
Size = tuple[int, int]
MAX_LISTED = 6  # words of the text that an error message lists
BYTE_PATTERN = re.compile(r"(?:\\x[0-9a-f]{2})+|\ufffd")  # parts of a character in the text of a token


def choose_attention_kind(recording: Recording, requested: str | None = None) -> str:
    """Return the kind of attention whose weights are shown: `requested`; by default self, or cross without self attention.

    Raises ConfigError where the recording has no attention of the kind `requested`.
    """
    kinds = [kind for kind in KINDS if recording.layers(kind)]
    implicit = describe_implicit_layers(recording)
    if requested in kinds or (requested is None and (kinds or implicit is None)):
        return requested or (kinds or KINDS)[0]
    others = f"; it has {' and '.join(kinds)}" if kinds else ""
    message = f"this recording has no {requested or KINDS[0]} attention{others}."
    raise ConfigError(f"{message} {implicit}" if implicit else message)


def choose_map_kind(recording: Recording, requested: str | None = None) -> str:
    """Return the kind of map to show: as `choose_attention_kind`, or implicit where no layer has a softmax."""
    has_softmax = any(recording.layers(kind) for kind in KINDS)
    if recording.last.list_all_visits(IMPLICIT) and (requested == IMPLICIT or not (requested or has_softmax)):
        return IMPLICIT
    return choose_attention_kind(recording, requested)


def describe_implicit_layers(recording: Recording) -> str | None:
    """Return the sentence that stands where only weights of a softmax are drawn; None if all layers have them."""
    count = len(recording.last.list_all_visits(IMPLICIT))
    if not count:
        return None
    layers = "one layer attends" if count == 1 else f"{count} layers attend"
    return f"Not drawn here: {layers} without a softmax. regard.figure(recording, layer, head, kind='implicit') draws them."


def match_words(words: Words | None, row: int, count: int) -> list[str]:
    """Return the words of a batch row if there are `count` of them, else the indices."""
    return find_words(words, row, count) or [str(n) for n in range(count)]


def find_words(words: Words | None, row: int, count: int) -> list[str] | None:
    """Return the words of a batch row if there are `count` of them, else None."""
    found: Sequence[object] = () if words is None else words
    if len(found) and not isinstance(found[0], str):
        found = found[row]  # type: ignore[assignment]
    return [str(word) for word in found] if len(found) == count else None


def get_axis_words(recording: Recording, layer: int | str, kind: str, part: str | None, row: int, size: Size) -> AxisWords:
    """Return the words of the queries and of the keys of a layer, or their indices; `size` is (queries, keys)."""
    asking, answering = recording.words(layer, kind, part)
    keys = match_words(answering, row, size[1])
    are_last = kind != "cross" and size[0] <= size[1] and asking is None  # the queries are the last of their keys
    return keys[size[1] - size[0] :] if are_last else match_words(asking, row, size[0]), keys


def describe_bytes(words: Sequence[str]) -> str | None:
    """Return a note where the words contain bytes of split characters, or None where every word is text."""
    part = next((found[0] for found in map(BYTE_PATTERN.search, words) if found), None)
    return part and f"Letters that the model has no tokens for are read byte by byte and shown like {part}."


def find_word(query: str, words: Sequence[str]) -> tuple[int, list[int]]:
    """Find a word and return its last position, and all its positions; a word of several tokens is at its last token.

    Text that is no word is read as a token index, counted from the end if negative. Raises ConfigError where it is neither.
    """
    sought = query.strip()
    places = [n for n, word in enumerate(words) if strip_markers(word) == sought] or find_split_word(sought, words)
    if sought and places:
        return places[-1], places
    try:
        number = range(len(words))[int(query)]
    except (ValueError, IndexError):
        some = list(dict.fromkeys(strip_markers(word) for word in words if strip_markers(word)))[:MAX_LISTED]
        raise ConfigError(
            f"{query!r} is neither a word of the text nor a number from 0 to {len(words) - 1}. "
            f"The first words are {', '.join(map(repr, some))}."
        ) from None
    return number, [number]


def find_split_word(query: str, words: Sequence[str]) -> list[int]:
    """Find the positions of the last tokens of a word of several tokens."""
    text, places, found = "".join(words), [], 0
    for n, word in enumerate(words):
        places += [n] * len(word)  # for each character, the index of its token
    starts = []
    while query and (found := text.find(query, found)) >= 0:
        starts.append(found)
        found += 1
    return [
        places[start + len(query) - 1]
        for start in starts
        if not text[start - 1 : start].isalnum() and not text[start + len(query) : start + len(query) + 1].isalnum()
    ]


def strip_markers(word: str) -> str:
    """Strip the markers of white space and of word pieces from a token."""
    return word.strip(MARKS).removeprefix("##")
