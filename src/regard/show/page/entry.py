"""A recording as the page stores it: its id, its maps, and the words along their axes."""

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.observe import Recording
from regard.observe.heads import Head
from regard.observe.recording import KINDS
from regard.observe.strand import Strand
from regard.observe.words import TwoTexts, sides
from regard.observe.words import rows as by_row
from regard.show.page import size
from regard.show.page.alone import alone

FIRST = 2000  # maximum words per list in the summary
BEGINNING = 80  # letters of the text in the summary
LETTERS = 256  # maximum letters of a word
FIRST_LETTERS = 2**15  # maximum letters of all words of a list in the summary
MISSED = 20  # maximum sentences on what was not recorded
MAPS_BYTES = 32 * 2**20  # maximum bytes of the cached maps; the last is always kept
ROW_BYTES = 16  # maximum bytes of a row's denominator
LAYER_BYTES = 8 * 2**20  # maximum bytes of a layer whose calls are joined for all heads at once


Key = tuple[str, str | None, int, int | None]  # kind, part, layer, and head or None for all of them


@dataclass(frozen=True)
class Place:
    """Position of a head: the kind of attention and the part of the model, the batch row, the layer within these, the head.

    `head` counts the recorded heads; the model may have others before it, see `Entry.number`.
    """

    kind: str = "self"
    part: str | None = None
    b: int = 0
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class Attention:
    """All layers of a kind and a part: their names, the shape (b, h, q, k) of each, and the model's numbers of its heads."""

    kind: str
    part: str | None
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int, int, int], ...]
    numbers: tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Entry:
    """A recording with its id, the likeliest next words, notes, and its text.

    `text` is set where the page's own model read it, so that the model can be examined on it.
    """

    id: str
    recording: Recording
    next: list[dict[str, Any]] | None = None
    notes: list[str] = field(default_factory=list)
    text: str | None = None
    typed: dict[tuple[str, str | None], tuple[list[Head], list[str]]] = field(default_factory=dict)  # the kinds of heads
    _maps: "OrderedDict[Key, tuple[AttentionMap, int]]" = field(default_factory=OrderedDict)  # with the bytes of each
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def attentions(self) -> list[Attention]:
        """Recorded layers by kind and part."""
        found = []
        parts: Sequence[str | None] = self.recording.last.parts or [None]
        for part in parts:
            for kind in KINDS:
                names = self.recording.layers(kind, part)
                shapes = tuple(shape(self.recording.last.of(n, kind, part)) for n in range(len(names)))
                if names:
                    numbers = tuple(self.recording.heads(n, kind, part) for n in range(len(names)))
                    found.append(Attention(kind, part, tuple(names), shapes, numbers))
        return found

    def attention(self, place: Place) -> Attention:
        """Return the layers of a place's kind and part. Raises ConfigError where there are none."""
        for one in self.attentions:
            if one.kind == place.kind and place.part in (one.part, None):
                return one
        raise ConfigError(f"there is no {place.kind} attention of part {place.part!r} in this recording.")

    def shape(self, place: Place) -> tuple[int, int, int, int]:
        """Return the axes (b, h, q, k) of a place's layer. Raises ConfigError where the place does not exist."""
        attention = self.attention(place)
        within("layer", place.layer, len(attention.names))
        b, h, q, k = attention.shapes[place.layer]
        within("b", place.b, b)
        within("head", place.head, h)
        return b, h, q, k

    def layer(self, place: Place) -> AttentionMap:
        """Return the map (1, h, q, k) of all heads of a place's layer, of its batch row."""
        self.shape(place)
        return self.kept(place, None)[0].select(batch=place.b)

    def map(self, place: Place) -> AttentionMap:
        """Return the map (1, 1, q, k) of a place's head."""
        return self.known(place)[0]

    def known(self, place: Place) -> tuple[AttentionMap, int]:
        """Return the map of a place's head and its bytes; where many calls of a large layer are joined, of this head alone."""
        self.shape(place)
        strands = self.strands(place)
        if joins(strands) and size.of_strands(strands) > LAYER_BYTES:
            found, count = self.kept(place, place.head)
            return found.select(batch=place.b), count
        found, count = self.kept(place, None)
        return found.select(batch=place.b, heads=place.head), count

    def kept(self, place: Place, head: int | None) -> tuple[AttentionMap, int]:
        """Return the map of a place's layer, or of one of its heads, and its bytes, from a cache of the last few."""
        part = self.attention(place).part
        key = place.kind, part, place.layer, head
        with self._lock:
            if key not in self._maps:
                whole = self.recording if head is None else alone(self.recording, place.kind, part, place.layer, head)
                found = whole.map(place.layer, kind=place.kind, part=part)
                copied = size.of_map(found) if joins(self.strands(place)) else 0
                self._maps[key] = found, copied + ROW_BYTES * math.prod(found.shape[:3])
            self._maps.move_to_end(key)
            while len(self._maps) > 1 and sum(count for _, count in self._maps.values()) > MAPS_BYTES:
                self._maps.popitem(last=False)
            return self._maps[key]

    def strands(self, place: Place) -> list[Strand]:
        """Return the recorded calls of a place's layer."""
        return self.recording.last.of(place.layer, place.kind, self.attention(place).part)

    def values(self, place: Place) -> Tensor | None:
        """Return the values (k, e) of a place's head, or None where they were not kept."""
        self.shape(place)
        part = self.attention(place).part
        one = alone(self.recording, place.kind, part, place.layer, place.head)
        found = one.values(place.layer, kind=place.kind, part=part)
        return None if found is None else found[place.b, 0]

    def kind(self, place: Place) -> str | None:
        """Return the kind of a place's head, or None where it is not computed yet."""
        rows, _ = self.typed.get((place.kind, self.attention(place).part), ([], []))
        return next((row.kind for row in rows if (row.layer, row.head) == (place.layer, self.number(place))), None)

    def number(self, place: Place) -> int:
        """Return the number in the model of a place's head, which counts the recorded heads."""
        self.shape(place)
        return self.attention(place).numbers[place.layer][place.head]

    def words(self, place: Place) -> tuple[Sequence[str], Sequence[str]]:
        """Return the words along the rows and the columns of a place, or their indices."""
        _, _, q, k = self.shape(place)
        attention = self.attention(place)
        lists, names = self.lists(place.b), (self.list_of(attention, 0), self.list_of(attention, 1))
        rows, columns = (None if name is None else lists[name] for name in names)
        return rows or list(map(str, range(q))), columns or list(map(str, range(k)))

    def lists(self, b: int = 0) -> dict[str, Sequence[str]]:
        """Return the lists of words of a batch row: `words`, and `queries`, the last of them, where the others are only keys.

        With two texts also `source`, the other one, and `read`, what the decoder read, where that differs from what it wrote.
        """
        rows = self.rows
        if not rows:
            return {}
        within("b", b, max(len(rows), *(shape[0] for one in self.attentions for shape in one.shapes)))
        words = at(b, rows)
        counts = {shape[2] for one in self.attentions if one.kind == "self" for shape in one.shapes if shape[3] == len(words)}
        short = min(counts, default=len(words))
        found = {"words": words} | ({"queries": words[-short:]} if 0 < short < len(words) else {})
        tokens = self.recording.tokens
        if not isinstance(tokens, TwoTexts):
            return found
        read = {} if tokens.read is tokens.rows else {"read": at(b, by_row(tokens.read))}
        return found | {"source": at(b, by_row(tokens.columns))} | read

    @cached_property
    def rows(self) -> list[Sequence[str]]:
        """Words of the recording, of two texts the target's, of each batch row or of all; empty where there are none."""
        tokens = self.recording.tokens
        return by_row(tokens.rows if isinstance(tokens, TwoTexts) else tokens) if tokens else []

    def list_of(self, attention: Attention, axis: int) -> str | None:
        """Return the name of the list of words along an axis, 0 for rows or 1 for columns; None where none fits all layers."""
        lengths = {shape[2 + axis] for shape in attention.shapes}
        lists, tokens = self.lists(), self.recording.tokens
        if isinstance(tokens, TwoTexts):
            own = sides(tokens, attention.kind, attention.names[0])[axis]
            name = "source" if own is tokens.columns else "words" if own is tokens.rows else "read"
            lists = {name: lists[name]}
        return next((name for name, words in lists.items() if {len(words)} == lengths), None)


def at(b: int, rows: list[Sequence[str]]) -> Sequence[str]:
    """Return the words of a batch row, or of all rows."""
    return rows[b if len(rows) > 1 else 0]


def joins(strands: list[Strand]) -> bool:
    """Return whether the map of a layer joins several calls, and so copies them."""
    return len(strands) > 1 or len(strands[0].pieces) > 1


def shape(strands: list[Strand]) -> tuple[int, int, int, int]:
    """Return the axes (b, h, q, k) of the map of a layer, without making the map."""
    b, h = strands[0].pieces[-1].q.shape[:2]
    q = sum(piece.q.shape[2] for strand in strands for piece in strand.pieces)
    k = sum(strand.total - (strand.pieces[0].first if len(strand.pieces) == 1 else 0) for strand in strands)
    return int(b), int(h), int(q), int(k)


def short(word: str) -> str:
    """Cut a word at 256 letters."""
    return word if len(word) <= LETTERS else word[:LETTERS] + "…"


def first(words: Sequence[str]) -> list[str]:
    """Return the words of the summary: the first 2,000, or fewer where they are long."""
    found, room = [], FIRST_LETTERS
    for word in words[:FIRST]:
        room -= min(len(word), LETTERS)
        if room < 0:
            break
        found.append(short(word))
    return found


def within(name: str, number: int, count: int) -> None:
    """Raise ConfigError for a number that is not at least 0 and below `count`."""
    if not 0 <= number < count:
        raise ConfigError(f"{name} must be at least 0 and below {count:,}, got {number}.")


def layer(attention: Attention, n: int) -> dict[str, Any]:
    """Summarize a layer, with the model's numbers of its heads where these are not 0 to h - 1."""
    _, h, q, k = attention.shapes[n]
    found = {"name": short(attention.names[n]), "heads": h, "queries": q, "keys": k}
    numbers = attention.numbers[n]
    return found if numbers == tuple(range(h)) else found | {"numbers": list(numbers)}


def summary(entry: Entry) -> dict[str, Any]:
    """Summarize a recording: what the page needs before its other requests."""
    words = entry.lists()
    text = "".join((words.get("source") or words.get("words", ()))[:BEGINNING])
    return {
        "id": entry.id,
        "model": short(entry.recording.model),
        "text": text[:BEGINNING],
        "batch": max((shape[0] for one in entry.attentions for shape in one.shapes), default=0),
        "attentions": [
            {
                "kind": one.kind,
                "part": one.part,
                "rows": entry.list_of(one, 0),
                "columns": entry.list_of(one, 1),
                "layers": [layer(one, n) for n in range(len(one.names))],
            }
            for one in entry.attentions
        ],
        "words": {name: {"count": len(some), "first": first(some)} for name, some in words.items()},
        "next": entry.next,
        "values": any(piece.values is not None for call in entry.recording.last.calls for piece in call.strand.pieces),
        "missed": [
            f"{one.module or 'the model'}: {one.kernel} was not recorded: {one.reason}."
            for one in entry.recording.missed[:MISSED]
        ],
        "notes": entry.notes,
        "examines": entry.text is not None,
    }
