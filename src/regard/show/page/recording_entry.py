"""A recording as the page stores it: its id, its maps, and the words along their axes."""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from itertools import chain, count
from typing import Any

from torch import Tensor

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.observe import Recording
from regard.observe.classification.head_scores import UserScore
from regard.observe.classification.repeated_calls import split_calls
from regard.observe.head_table import Head
from regard.observe.recorded_runs.part_names import describe_module
from regard.observe.recorded_runs.run import IMPLICIT, KINDS
from regard.observe.recorded_runs.token_ids import ENCODER, find_side
from regard.observe.recorded_runs.words import TextPair, fit_words
from regard.observe.recorded_runs.words import split_rows as by_row
from regard.observe.stored_calls.joined_maps import compute_shape
from regard.observe.stored_calls.kv_history import KVHistory
from regard.observe.token_places.places import CROSS, AudioFrames
from regard.show.axis_words import choose_attention_kind
from regard.show.page import memory_size
from regard.show.page.image_places import GridTable, can_roll_out, name_places
from regard.show.page.image_pulls import LayerKey, NumberPull, count_pull_heads
from regard.show.page.implicit_pictures import (
    PICTURE_PIXELS,
    ImplicitLayer,
    build_implicit_map,
    list_implicit_layers,
    summarize_implicit,
)
from regard.show.page.select_head import hide_first_token, select_head

MAX_FIRST_WORDS = 2000  # maximum words per list in the summary
TEXT_LETTERS = 80  # letters of the text in the summary
LINKED_LETTERS = 400  # maximum letters of a text that a link holds
WORD_LETTERS = 256  # maximum letters of a word
FIRST_LETTERS = 2**15  # maximum letters of all words of a list in the summary
WITHOUT_FIRST = ":rest"  # after the id of a recording: its first token is hidden
MAX_MISSED = 20  # maximum sentences on what was not recorded
MAX_MAPS_BYTES = 32 * 2**20  # maximum bytes of the cached maps; the last is always kept
ROW_BYTES = 16  # maximum bytes of a row's denominator
MAX_JOINED_LAYER_BYTES = 8 * 2**20  # maximum bytes of a layer whose calls are joined for all heads at once


WordLists = dict[str, list[Sequence[str]]]  # by name, of each batch row or of all
AxisKey = tuple[str, str | None]  # kind and part, or the name of a layer without a softmax
MapKey = tuple[str, str | None, int, int | None]  # kind, part, layer, and head or None for all of them


@dataclass(frozen=True)
class HeadPlace:
    """Position of a head: the kind of attention and the part of the model, the batch row, the layer within these, the head.

    `head` counts the recorded heads; the model may have others before it, see `Entry.number`.
    """

    kind: str = "self"
    part: str | None = None
    b: int = 0
    layer: int = 0
    head: int = 0


@dataclass(frozen=True)
class AttentionLayers:
    """All layers of a kind and a part: their names, the shape (b, h, q, k) of each, and the model's numbers of its heads."""

    kind: str
    part: str | None
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int, int, int], ...]
    head_numbers: tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class RecordingEntry:
    """A recording with its id, the likeliest next words, notes, and its text.

    `text` is set where the page's own model read it, so that the model can be examined on it, `ids`, (1, t), where that model
    predicts the next word, so that its gradients can be taken, and `story` where it wrote the words. `scores` are the user's
    own scores of heads, as regard.heads takes them. `images` are the addresses of the images that the model read, `pull` is
    what weights did to a number, which is shown in the images.
    """

    id: str
    recording: Recording
    next_words: list[dict[str, Any]] | None = None
    notes: list[str] = field(default_factory=list)
    text: str | None = None
    scores: Sequence[UserScore] = ()
    ids: Tensor | None = None
    story: dict[str, Any] | None = None
    images: Sequence[str] = ()
    pull: NumberPull | None = None
    other_model: str | None = None  # the name of the model that read the text, where it is not the first of the page
    state: dict[str, Any] | None = None  # of the page's link, where it opens: kind, part, layer and query of an image's words
    head_rows: dict[tuple[str, str | None], tuple[list[Head], list[str]]] = field(default_factory=dict)  # the kinds of heads
    _maps: "OrderedDict[MapKey, tuple[AttentionMap, int]]" = field(default_factory=OrderedDict)  # with the bytes of each
    implicit_pixels: int = PICTURE_PIXELS  # along each side of a picture of a layer without a softmax
    _implicit: tuple[int, ImplicitMap] | None = None  # the number and the map of the layer without a softmax used last
    _lock: threading.Lock = field(default_factory=threading.Lock)
    splits: InitVar[bool] = True

    def __post_init__(self, splits: bool) -> None:
        """Make calls of a module without a joined map layers of their own, in the pull too, if `splits`."""
        split, notes = split_calls(self.recording) if splits and self.recording.runs else (self.recording, ())
        if notes:
            self.recording, self.notes = split, [*self.notes, *notes]
            self.pull = None if self.pull is None else self.pull.select_run(split.last)

    @cached_property
    def without_first(self) -> "RecordingEntry":
        """The same with the first token hidden, which many heads use as a sink."""
        hidden = hide_first_token(self.recording)
        return RecordingEntry(
            self.id + WITHOUT_FIRST, hidden, self.next_words, scores=self.scores, images=self.images, splits=False
        )

    @cached_property
    def attention_layers(self) -> list[AttentionLayers]:
        """Recorded layers by kind and part."""
        found = []
        parts: Sequence[str | None] = self.recording.last.parts or [None]
        for part in parts:
            for kind in KINDS:
                names = self.recording.layers(kind, part)
                shapes = tuple(compute_shape(self.recording.last.find_histories(n, kind, part)) for n in range(len(names)))
                if names:
                    numbers = tuple(self.recording.heads(n, kind, part) for n in range(len(names)))
                    found.append(AttentionLayers(kind, part, tuple(names), shapes, numbers))
        if not found and not self.implicit_layers:
            choose_attention_kind(self.recording)  # raises ConfigError
        return found

    @property
    def implicit_layers(self) -> list[ImplicitLayer]:
        """Recorded layers without a softmax, of all parts."""
        return self.described_implicit[0]

    @cached_property
    def described_implicit(self) -> tuple[list[ImplicitLayer], list[str]]:
        """Recorded layers without a softmax, and a sentence on each that has no map."""
        return list_implicit_layers(self.recording.last) if self.recording.runs else ([], [])

    @cached_property
    def pull_heads(self) -> dict[LayerKey, int]:
        """How many matrices of pulls each layer has: one for each head, or one, their mean."""
        return count_pull_heads(self.recording, self.pull, self.layer_shapes) if self.pull else {}

    @property
    def layer_shapes(self) -> dict[LayerKey, tuple[int, int, int, int]]:
        """The axes (b, h, q, k) of each layer."""
        return {(one.kind, one.part, n): shape for one in self.attention_layers for n, shape in enumerate(one.shapes)}

    def get_implicit_map(self, layer: int, b: int, head: int) -> ImplicitMap:
        """Return the map (1, 1, q, k) of a head of a layer without a softmax. Raises ConfigError where there is none."""
        check_index("layer", layer, len(self.implicit_layers))
        one = self.implicit_layers[layer]
        check_index("b", b, one.shape[0])
        check_index("head", head, one.shape[1])
        with self._lock:
            if self._implicit is None or self._implicit[0] != layer:
                self._implicit = layer, build_implicit_map(self.recording.last, one.calls)
            return self._implicit[1].select(batch=b, heads=head)

    def get_layers(self, place: HeadPlace) -> AttentionLayers:
        """Return the layers of a place's kind and part. Raises ConfigError where there are none."""
        for one in self.attention_layers:
            if one.kind == place.kind and place.part in (one.part, None):
                return one
        raise ConfigError(f"this recording has no {place.kind} attention of part {place.part!r}.")

    def get_shape(self, place: HeadPlace) -> tuple[int, int, int, int]:
        """Return the axes (b, h, q, k) of a place's layer. Raises ConfigError where the place does not exist."""
        attention = self.get_layers(place)
        check_index("layer", place.layer, len(attention.names))
        b, h, q, k = attention.shapes[place.layer]
        check_index("b", place.b, b)
        check_index("head", place.head, h)
        return b, h, q, k

    def get_layer_map(self, place: HeadPlace) -> AttentionMap:
        """Return the map (1, h, q, k) of all heads of a place's layer, of its batch row."""
        self.get_shape(place)
        return self.get_cached_map(place, None)[0].select(batch=place.b)

    def get_map(self, place: HeadPlace) -> AttentionMap:
        """Return the map (1, 1, q, k) of a place's head."""
        return self.get_sized_map(place)[0]

    def get_sized_map(self, place: HeadPlace) -> tuple[AttentionMap, int]:
        """Return the map of a place's head and its bytes; where many calls of a large layer are joined, of this head alone."""
        self.get_shape(place)
        histories = self.find_histories(place)
        if is_joined(histories) and memory_size.measure_histories(histories) > MAX_JOINED_LAYER_BYTES:
            found, count = self.get_cached_map(place, place.head)
            return found.select(batch=place.b), count
        found, count = self.get_cached_map(place, None)
        return found.select(batch=place.b, heads=place.head), count

    def get_cached_map(self, place: HeadPlace, head: int | None) -> tuple[AttentionMap, int]:
        """Return the map of a place's layer, or of one of its heads, and its bytes, from a cache of the last few."""
        part = self.get_layers(place).part
        key = place.kind, part, place.layer, head
        with self._lock:
            if key not in self._maps:
                whole = self.recording if head is None else select_head(self.recording, place.kind, part, place.layer, head)
                found = whole.map(place.layer, kind=place.kind, part=part)
                copied = memory_size.measure_map(found) if is_joined(self.find_histories(place)) else 0
                self._maps[key] = found, copied + ROW_BYTES * math.prod(found.shape[:3])
            self._maps.move_to_end(key)
            while len(self._maps) > 1 and sum(count for _, count in self._maps.values()) > MAX_MAPS_BYTES:
                self._maps.popitem(last=False)
            return self._maps[key]

    def find_histories(self, place: HeadPlace) -> list[KVHistory]:
        """Return the recorded calls of a place's layer."""
        return self.recording.last.find_histories(place.layer, place.kind, self.get_layers(place).part)

    def get_values(self, place: HeadPlace) -> Tensor | None:
        """Return the values (k, e) of a place's head, or None where they were not kept."""
        self.get_shape(place)
        part = self.get_layers(place).part
        one = select_head(self.recording, place.kind, part, place.layer, place.head)
        found = one.values(place.layer, kind=place.kind, part=part)
        return None if found is None else found[place.b, 0]

    def get_kind(self, place: HeadPlace) -> str | None:
        """Return the kind of a place's head, or None where it is not computed yet."""
        rows, _ = self.head_rows.get((place.kind, self.get_layers(place).part), ([], []))
        return next((row.kind for row in rows if (row.layer, row.head) == (place.layer, self.get_head_number(place))), None)

    def get_head_number(self, place: HeadPlace) -> int:
        """Return the number in the model of a place's head, which counts the recorded heads."""
        self.get_shape(place)
        return self.get_layers(place).head_numbers[place.layer][place.head]

    def get_axis_words(self, place: HeadPlace) -> tuple[Sequence[str], Sequence[str]]:
        """Return the words along the rows and the columns of a place, or their indices."""
        _, _, q, k = self.get_shape(place)
        attention = self.get_layers(place)
        lists, names = self.get_word_lists(place.b), (self.find_word_list(attention, 0), self.find_word_list(attention, 1))
        rows, columns = (None if name is None else lists[name] for name in names)
        return rows or list(map(str, range(q))), columns or list(map(str, range(k)))

    def get_word_lists(self, b: int = 0) -> dict[str, Sequence[str]]:
        """Return the lists of words of a batch row; see word_lists."""
        lists = self.word_lists[0]
        check_index("b", b, max((*map(len, lists.values()), self.count_batch_rows())))
        return {name: rows[b if len(rows) > 1 else 0] for name, rows in lists.items() if b < len(rows) or len(rows) == 1}

    @cached_property
    def word_lists(self) -> tuple[WordLists, dict[AxisKey, tuple[str | None, str | None]]]:
        """Lists of words by name, of each batch row or of all, and those along the rows and columns of each kind and part.

        They are `words`, and `queries`, the last of them, where the others are only keys. With two texts also `source`, the
        other one, `read`, what the decoder read, where that differs from what it wrote, and `encoder`, the source before beams
        repeated its rows.
        """
        lists: WordLists = {}
        found: dict[AxisKey, tuple[str | None, str | None]] = {}
        tokens = self.recording.tokens
        for kind, part, (rows, columns) in self.iterate_axis_words():
            is_source = isinstance(tokens, TextPair) and (kind == CROSS or find_side(part or "") == ENCODER)
            last = add_word_list(lists, columns, ("source", "encoder") if is_source else ("words", "read"))
            found[kind, part] = add_word_list(lists, rows, ("words", "read") if kind == CROSS else ("queries",)), last
        if tokens and not lists:
            lists["words"] = by_row(tokens.rows if isinstance(tokens, TextPair) else tokens)
        return lists, found

    def iterate_axis_words(self) -> Iterator[tuple[str, str | None, tuple[Any, Any]]]:
        """Yield the words along the rows and columns of each kind and part, None where not all of its layers have them.

        Cross attention is first, whose rows are what was written.
        """
        for one in sorted(self.attention_layers, key=lambda one: one.kind != CROSS):
            b, _, q, k = one.shapes[0]
            names = fit_words(self.place_names or None, b, q), fit_words(self.place_names or None, b, k)
            rows, columns = self.recording.words(0, one.kind, one.part) if self.recording.tokens else names
            sizes = [{(shape[0], shape[axis]) for shape in one.shapes} for axis in (2, 3)]
            yield one.kind, one.part, (rows if len(sizes[0]) == 1 else None, columns if len(sizes[1]) == 1 else None)
        for layer in self.implicit_layers:
            words = self.recording.words(layer.calls[0][0], IMPLICIT)[1] if self.recording.tokens else None
            yield IMPLICIT, layer.name, (None, words)

    @cached_property
    def place_names(self) -> list[str]:
        """The names of the tokens as patches of an image or frames of sound, where all layers of a recording have the same.

        Empty for a recording with words.
        """
        selves = [one for one in self.attention_layers if one.kind == "self"]
        found = {
            (tuple(self.recording.axis_places(n, one.kind, one.part)[0]), shape[3])
            for one in selves
            for n, shape in enumerate(one.shapes)
        }
        return name_places(*found.pop()) if len(found) == 1 and not self.recording.tokens else []

    def find_unit(self, attention: AttentionLayers) -> str:
        """Return what the queries of some layers are: "patch" or "frame" where their places say so, else "token"."""
        places = [] if self.recording.tokens else self.recording.axis_places(0, attention.kind, attention.part)[0]
        return "token" if not places else "frame" if isinstance(places[0], AudioFrames) else "patch"

    def count_batch_rows(self) -> int:
        """Return the number of batch rows of the layer that has the most."""
        shapes = [shape for one in self.attention_layers for shape in one.shapes]
        return max((shape[0] for shape in (*shapes, *(one.shape for one in self.implicit_layers))), default=0)

    def find_word_list(self, attention: AttentionLayers, axis: int) -> str | None:
        """Return the name of the list of words along an axis, 0 for rows or 1 for columns; None where none fits all layers."""
        return self.word_lists[1][attention.kind, attention.part][axis]


def add_word_list(lists: WordLists, words: Any, names: Sequence[str]) -> str | None:
    """Return the name of the list that has some words, which is added under the first free one of `names`; None without any."""
    if words is None:
        return None
    rows = by_row(words)
    known = next((name for name, some in lists.items() if some == rows), None)
    name = known or next(name for name in chain(names, map(str, count())) if name not in lists)
    lists[name] = rows
    return name


def is_joined(histories: list[KVHistory]) -> bool:
    """Return whether the map of a layer joins several calls, and so copies them."""
    return len(histories) > 1 or len(histories[0].stored_calls) > 1


def truncate_word(word: str) -> str:
    """Cut a word at 256 letters."""
    return word if len(word) <= WORD_LETTERS else word[:WORD_LETTERS] + "…"


def select_first_words(words: Sequence[str]) -> list[str]:
    """Return the words of the summary: the first 2,000, or fewer where they are long."""
    found, room = [], FIRST_LETTERS
    for word in words[:MAX_FIRST_WORDS]:
        room -= min(len(word), WORD_LETTERS)
        if room < 0:
            break
        found.append(truncate_word(word))
    return found


def check_index(name: str, number: int, count: int) -> None:
    """Raise ConfigError for a number that is not at least 0 and below `count`."""
    if not 0 <= number < count:
        raise ConfigError(f"{name} must be at least 0 and below {count:,}, got {number}.")


def summarize_layer(attention: AttentionLayers, n: int) -> dict[str, Any]:
    """Summarize a layer, with the model's numbers of its heads where these are not 0 to h - 1."""
    _, h, q, k = attention.shapes[n]
    found = {"name": truncate_word(attention.names[n]), "heads": h, "queries": q, "keys": k}
    numbers = attention.head_numbers[n]
    return found if numbers == tuple(range(h)) else found | {"numbers": list(numbers)}


def summarize_patches(entry: RecordingEntry, grids: GridTable, attention: AttentionLayers, n: int) -> dict[str, Any]:
    """Summarize which keys of a layer are patches of the images, and its batch rows; nothing without an image."""
    if not entry.images:
        return {}
    b, _, _, k = attention.shapes[n]
    found = grids.add_layer(entry.recording, n, attention.kind, attention.part, k)
    heads = entry.pull_heads.get((attention.kind, attention.part, n), 0)
    return {"batch": b, "grids": found, **({"pull": heads} if heads else {})} if found else {}


def make_request(entry: RecordingEntry) -> dict[str, Any] | None:
    """Return what a link must hold to make a recording again: the text, and how it was continued; None where it cannot."""
    found: dict[str, Any]
    if entry.story is not None:
        found = {name: entry.story[name] for name in ("text", "tokens", "temperature", "seed", "chat") if name in entry.story}
    else:
        found = {"text": entry.text}
    found |= {} if entry.other_model is None else {"model": entry.other_model}
    return found if entry.text and len(entry.text) <= LINKED_LETTERS and found.get("seed", 0) is not None else None


def summarize_entry(entry: RecordingEntry) -> dict[str, Any]:
    """Summarize a recording: what the page needs before its other requests."""
    words, grids = entry.get_word_lists(), GridTable()
    text = "".join((words.get("source") or words.get("words", ()))[:TEXT_LETTERS]) if entry.recording.tokens else ""
    return {
        "id": entry.id,
        "model": truncate_word(entry.recording.model),
        "text": text[:TEXT_LETTERS],
        "batch": max((shape[0] for one in entry.attention_layers for shape in one.shapes), default=entry.count_batch_rows()),
        "attentions": [
            {
                "kind": one.kind,
                "part": one.part,
                "unit": entry.find_unit(one),
                "rows": entry.find_word_list(one, 0),
                "columns": entry.find_word_list(one, 1),
                **(
                    {"rollout": can_roll_out(entry.recording, one.part, one.shapes)}
                    if entry.images and one.kind == "self"
                    else {}
                ),
                "layers": [summarize_layer(one, n) | summarize_patches(entry, grids, one, n) for n in range(len(one.names))],
            }
            for one in entry.attention_layers
        ],
        "implicit": summarize_implicit(entry.implicit_layers, entry.implicit_pixels, entry.word_lists[1]),
        **({"images": list(entry.images), "grids": grids.grids} if entry.images else {}),
        **({"state": entry.state} if entry.state else {}),
        **({"number": entry.pull.number} if entry.pull else {}),
        "words": {name: {"count": len(some), "first": select_first_words(some)} for name, some in words.items()},
        "next": entry.next_words,
        "values": any(
            stored.v is not None for call in entry.recording.last.softmax_calls for stored in call.history.stored_calls
        ),
        "missed": describe_missed(entry.recording),
        "notes": [*entry.notes, *entry.described_implicit[1]],
        "examines": entry.text is not None,
        "attributable": entry.ids is not None,
        "request": make_request(entry),
        "typed": entry.text if entry.story is None else None,
        "generated": entry.story is not None,
    }


def describe_missed(recording: Recording) -> list[str]:
    """Return a sentence on the modules of which nothing was recorded, and what of others was not."""
    parts = [one for one in recording.missed if one.module in recording.names]
    others = [f"{describe_module(one.module)}: {one.kernel} was not recorded: {one.reason}." for one in parts[:MAX_MISSED]]
    return [*filter(None, [recording.describe_missed()]), *others]
