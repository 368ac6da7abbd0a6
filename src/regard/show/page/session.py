"""The recordings that a page shows, within a memory limit, and the model that makes more of them."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

import regard.lectures.examples as lectures
from regard.errors import ConfigError
from regard.map.attribution_map import AttributionMap
from regard.observe import Recording
from regard.observe.head_scores import UserScore
from regard.show.page import attributions, gallery, memory_size, translator_adapter, word_influence
from regard.show.page.finding import LEAK, Finding, find_finding, find_head_finding
from regard.show.page.head_pictures import Alive, OpenedHead
from regard.show.page.json_encoding import encode_json
from regard.show.page.model_adapter import (
    ModelAdapter,
    RecordedText,
    can_generate,
    generate_tokens,
    list_sentences,
    record_text,
)
from regard.show.page.model_examination import examine_model
from regard.show.page.model_lock import hold_model_lock
from regard.show.page.params import MissingError
from regard.show.page.recording_entry import Place, RecordingEntry, summarize_entry
from regard.show.page.recording_id import encode_text, identify_model, identify_recording, make_id
from regard.show.page.translator_adapter import TranslatorAdapter

MAX_TYPED = 32  # maximum recordings of typed texts
MAX_TYPED_BYTES = 16 * 2**20  # maximum bytes of recordings of typed texts; the newest is always kept
MAX_OPENED_BYTES = 120 * 2**20  # maximum bytes of opened heads; the newest is always kept
MAX_CHARACTERS = 20_000  # maximum characters of a text
MAX_NEW_TOKENS = 320  # maximum tokens generated at a time
MAX_READ_TOKENS = 2048  # maximum tokens read of a text, where the model's context is longer
MAX_STEP_WORDS = 64  # maximum words for which all steps of a head are shown
TRANSLATION_ID, LEAK_ID = "translation", "leak"  # the ids of the recordings of the gallery that are not of the page's model


class Session:
    """Recordings by id, the opened heads, and a model; several threads may use it at once."""

    def __init__(
        self,
        recording: Recording | None = None,
        adapter: ModelAdapter | TranslatorAdapter | None = None,
        version: str = "",
        scores: Sequence[UserScore] = (),
    ) -> None:
        self.adapter, self.version, self.scores = adapter, version, scores
        self._entries: OrderedDict[str, RecordingEntry] = OrderedDict()
        self._opened: OrderedDict[tuple[str, Place], OpenedHead] = OrderedDict()
        self._attributions = attributions.AttributionCache()
        self._findings: dict[tuple[str, str | None], Finding | None] = {}  # by recording and the kind that is wanted
        self._projection_reason: list[str | None] = []  # one item once it is known
        self._lock, self._model_lock, self._finding_lock = threading.RLock(), threading.Lock(), threading.Lock()
        self._model_id = functools.cache(lambda: b"" if adapter is None else identify_model(adapter))
        self._listed: list[str] = []  # for all visitors
        self._pinned = {TRANSLATION_ID, LEAK_ID}  # these are never removed
        if recording is not None:
            self._pinned.add(self.add_recording(recording).id)

    def get_start_state(self) -> dict[str, Any]:
        """Return the initial state of the page."""
        return {
            "version": self.version,
            "model": None if self.adapter is None else self.adapter.name,
            "writes": can_generate(self.adapter),
            "translates": isinstance(self.adapter, TranslatorAdapter),
            "translation": {"id": TRANSLATION_ID, "sentence": translator_adapter.SENTENCE}
            if translator_adapter.has_example()
            else None,
            "recordings": self.summarize_recordings(self.listed),
            "sentences": list_sentences(self.adapter),
            "examples": list_examples(),
            "gallery": [
                {"name": one.name, "title": one.title, "view": one.view, "link": one.link}
                for one in gallery.list_gallery(self.adapter)
            ],
            "opening": gallery.OPENING if any(gallery.list_openings(self.adapter)) else None,
            "limits": get_limits(),
        }

    @property
    def listed(self) -> list[str]:
        """The ids of the recordings that all visitors see; those of the requests are seen by who asks for their ids."""
        with self._lock:
            return [name for name in self._listed if name in self._entries]

    def summarize_recordings(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Summarize those of some recordings that are here."""
        with self._lock:
            return [summarize_entry(self._entries[name]) for name in names if name in self._entries]

    def add_recording(self, recording: Recording) -> RecordingEntry:
        """Store a recording that all visitors see."""
        return self.add_entry(RecordingEntry(identify_recording(recording), recording, scores=self.scores), is_listed=True)

    def add_entry(self, entry: RecordingEntry, is_listed: bool = False) -> RecordingEntry:
        """Store a recording, or return the one with its id; where there are too many, the oldest typed ones are removed."""
        with self._lock:
            summarize_entry(entry)  # raises where the recording is not usable
            entry = self._entries.setdefault(entry.id, entry)
            self._entries.move_to_end(entry.id)
            if is_listed and entry.id not in self._listed:
                self._listed.append(entry.id)
            mine = [one for one in self._entries.values() if one.id not in self._pinned]
            while len(mine) > 1 and (
                len(mine) > MAX_TYPED or sum(memory_size.measure_recording(one.recording) for one in mine) > MAX_TYPED_BYTES
            ):
                self.remove_recording(mine.pop(0).id)
            return entry

    def remove_recording(self, name: str) -> None:
        """Remove a recording and all that was computed from it."""
        del self._entries[name]
        self._attributions.remove_recording(name)
        for key in [key for key in self._opened if key[0] == name]:
            del self._opened[key]
        for wanted in [wanted for owner, wanted in self._findings if owner == name]:
            del self._findings[name, wanted]

    def get_entry(self, name: str) -> RecordingEntry:
        """Return a recording by its id. Raises MissingError where it does not exist."""
        with self._lock:
            if name in self._entries:
                return self._entries[name]
        raise MissingError(
            f"there is no recording {name[:20]!r}; the oldest recordings of typed texts are removed to make room for new ones."
        )

    def open_head(self, entry: RecordingEntry, place: Place) -> OpenedHead:
        """Return an opened head; the least recently used ones are removed to make room, before it is computed."""
        key = entry.id, replace(place, part=entry.get_layers(place).part)
        with self._lock:
            known = self._opened.get(key)
        opened = known or OpenedHead(*entry.get_sized_map(place))  # outside of the lock: joining many calls takes a while
        with self._lock:
            self.get_entry(entry.id)  # raises if it was removed
            found = self._opened.setdefault(key, opened)
            self._opened.move_to_end(key)
            while len(self._opened) > 1 and sum(one.nbytes for one in self._opened.values()) > MAX_OPENED_BYTES:
                self._opened.popitem(last=False)
            return found

    def list_opened(self) -> list[OpenedHead]:
        """Return the opened heads."""
        with self._lock:
            return list(self._opened.values())

    def run_text(self, text: str, alive: Alive, is_listed: bool = True) -> dict[str, Any]:
        """Run the model on a text, and return the summary of the recording; a text that was read is not read again."""
        adapter = self.require_model(text)
        own = None if isinstance(adapter, TranslatorAdapter) else text
        name = make_id(adapter.name, text, [self._model_id(), encode_text(text)])
        with hold_model_lock(self._model_lock, alive):
            entry = self._entries.get(name)
            if entry is None:
                read = record_text(adapter, text, MAX_READ_TOKENS)
                entry = RecordingEntry(name, read.recording, read.next_words, read.notes, own, self.scores, read.ids)
            return summarize_entry(self.add_entry(entry, is_listed))

    def examine_recording(self, name: str, sees: str, alive: Alive) -> dict[str, Any]:
        """Examine the model on the first words of the text of a recording. Raises MissingError where that is not possible."""
        text = self.get_entry(name).text
        if text is None or self.adapter is None or isinstance(self.adapter, TranslatorAdapter):
            raise MissingError(
                "who may see whom can be examined only for a text that the model read here: type a text and try again."
            )
        with hold_model_lock(self._model_lock, alive):
            return examine_model(self.adapter, text, sees)

    def explain_settings(self, entry: RecordingEntry, alive: Alive) -> dict[str, str | None]:
        """Return for each setting why the page cannot show it for a recording, None where it can."""
        adapter, ids = self.require_attributable(entry, Place())
        if not self._projection_reason:
            with hold_model_lock(self._model_lock, alive):
                self._projection_reason.append(attributions.explain_missing_projection(adapter, ids))
        return dict.fromkeys(attributions.SETTINGS) | {"carried": self._projection_reason[0]}

    def get_target(self, entry: RecordingEntry, at: int | None, token: int | None, alive: Alive) -> attributions.Target:
        """Return the logit of a token after a position with its gradients; by default of the likeliest, after the last one.

        The first request runs the model on the text and the gradient backward, once.
        """
        adapter, ids = self.require_attributable(entry, Place())
        at = entry.get_shape(Place())[2] - 1 if at is None else at
        known = self._attributions.find_target(entry, at, token)
        if known is not None:
            return known
        with hold_model_lock(self._model_lock, alive):
            found = self._attributions.find_target(entry, at, token)
            if found is None:
                found = attributions.compute_target(adapter, ids, entry, at, token)
                self.get_entry(entry.id)  # raises if it was removed meanwhile
                self._attributions.add_target(entry, found)
        return found

    def describe_target(self, entry: RecordingEntry, at: int | None, token: int | None, alive: Alive) -> dict[str, Any]:
        """Describe a target, see `get_target`."""
        found = self.get_target(entry, at, token, alive)
        return attributions.describe_target(self.require_attributable(entry, Place())[0], found)

    def get_attribution_map(
        self, entry: RecordingEntry, place: Place, setting: str, at: int | None, token: int | None, alive: Alive
    ) -> AttributionMap:
        """Return the map (1, h, q, k) of a setting other than the weight, of all heads of a place's layer."""
        self.require_attributable(entry, place)
        if setting != "carried":
            return self._attributions.get_map(entry, setting, place.layer, self.get_target(entry, at, token, alive))
        return self._attributions.get_map(entry, setting, place.layer, self.get_norms(entry, alive))

    def get_influence(self, entry: RecordingEntry, setting: str, at: int, token: int, alive: Alive) -> dict[str, Any]:
        """Return what every word did to the token after a position, by a setting; weights and norms are of that query alone."""
        self.require_attributable(entry, Place())
        if setting in ("weight", "carried"):
            norms = self.get_norms(entry, alive) if setting == "carried" else None
            return word_influence.encode_row(word_influence.average_last_rows(entry, at, norms))
        return word_influence.sum_influence(self.get_target(entry, at, token, alive).attribution, setting)

    def get_norms(self, entry: RecordingEntry, alive: Alive) -> list[Tensor]:
        """Return how long the values of each layer are after the output projection, (1, h, k, 1), computed once."""
        adapter, ids = self.require_attributable(entry, Place())
        norms = self._attributions.find_norms(entry)
        if norms is None:
            with hold_model_lock(self._model_lock, alive):
                norms = self._attributions.find_norms(entry)
                if norms is None:
                    norms = attributions.compute_norms(adapter, ids)
                    self.get_entry(entry.id)  # raises if it was removed meanwhile
                    self._attributions.add_norms(entry, norms)
        return norms

    def require_attributable(self, entry: RecordingEntry, place: Place) -> tuple[ModelAdapter, Tensor]:
        """Return the model that read a recording and the tokens (1, t). Raises ConfigError where no gradient can be taken."""
        ids = attributions.require_ids(entry, place)
        if self.adapter is None or isinstance(self.adapter, TranslatorAdapter):
            raise ConfigError("this page has no language model to run: start it with regard serve --model NAME.")
        return self.adapter, ids

    def get_translation(self, alive: Alive) -> dict[str, Any]:
        """Return the summary of the example's recording, made on the first request."""
        if not translator_adapter.has_example():
            raise MissingError("this package does not include a translator, so there is no translation to show.")
        with hold_model_lock(self._model_lock, alive):
            known = self._entries.get(TRANSLATION_ID)
            entry = known or RecordingEntry(TRANSLATION_ID, translator_adapter.record_example(), scores=self.scores)
            return summarize_entry(self.add_entry(entry))

    def get_finding(self, entry: RecordingEntry, wanted: str | None, alive: Alive) -> Finding | None:
        """Return the finding of a recording, see `find_finding`; it is computed once."""
        with hold_model_lock(self._finding_lock, alive):
            if (entry.id, wanted) not in self._findings:
                self._findings[entry.id, wanted] = find_finding(entry, alive, wanted)
            return self._findings[entry.id, wanted]

    def prepare_opening(self, alive: Alive) -> None:
        """Compute what the page opens on, before the first visitor asks for it."""
        for name in self.listed[:1]:
            self.get_finding(self.get_entry(name), None, alive)
        if not self.listed and any(gallery.list_openings(self.adapter)):
            self.open_first_finding(alive)

    def open_gallery(self, name: str, alive: Alive) -> dict[str, Any]:
        """Return the recording, the view and the finding of an item of the gallery. Raises MissingError if there is none."""
        if name == gallery.OPENING:
            return self.open_first_finding(alive)
        item = next((one for one in gallery.list_gallery(self.adapter) if one.name == name and one.link is None), None)
        if item is None:
            raise MissingError(f"there is no item {name[:20]!r} in the gallery of this page.")
        return self.show_item(item, *self.make_item(item, alive))

    def open_first_finding(self, alive: Alive) -> dict[str, Any]:
        """Return the item of the gallery that the page opens on."""
        return self.show_item(*self.find_opening(alive))

    def find_opening(self, alive: Alive) -> tuple[gallery.GalleryItem, RecordingEntry, Finding | None]:
        """Return the first item of the gallery whose kind of head the model has, else the first of all, with its finding."""
        found: list[tuple[gallery.GalleryItem, RecordingEntry, Finding | None]] = []
        for item in gallery.list_openings(self.adapter):
            found.append((item, *self.make_item(item, alive)))
            _, _, finding = found[-1]
            if finding is not None and finding.what == item.what:
                return found[-1]
        if not found:
            raise MissingError("this page has no text that its model can read: type one.")
        return found[0]

    def make_item(self, item: gallery.GalleryItem, alive: Alive) -> tuple[RecordingEntry, Finding | None]:
        """Make the recording of an item of the gallery, and its finding."""
        head = self.find_opening(alive)[2] if item.name == gallery.LONG else None  # before the long one, which has to stay
        if item.text:
            name = self.run_text(item.text, alive, is_listed=False)["id"]
        elif item.name == LEAK:
            name = self.get_leak(alive)["id"]
        else:
            name = self.get_translation(alive)["id"]
        entry = self.get_entry(name)
        if item.name != gallery.LONG:
            return entry, self.get_finding(entry, item.what, alive)
        return entry, None if head is None else find_head_finding(entry, head.place)

    def show_item(self, item: gallery.GalleryItem, entry: RecordingEntry, finding: Finding | None) -> dict[str, Any]:
        """Return an item of the gallery as JSON."""
        shown = None if finding is None else finding.to_dict()
        return {"name": item.name, "view": item.view, "recording": summarize_entry(entry), "finding": shown}

    def get_leak(self, alive: Alive) -> dict[str, Any]:
        """Return the summary of the recording of a model whose mask leaks, made on the first request."""
        with hold_model_lock(self._model_lock, alive):
            entry = self._entries.get(LEAK_ID) or RecordingEntry(LEAK_ID, gallery.record_leak(), scores=self.scores)
            return summarize_entry(self.add_entry(entry))

    def generate_text(
        self, text: str, tokens: int, temperature: float, seed: int | None, alive: Alive
    ) -> Iterator[dict[str, Any]]:
        """Generate text with the model, token by token, and yield the summary of its recording last."""
        adapter = self.require_model(text)
        if not 1 <= tokens <= MAX_NEW_TOKENS:
            raise ConfigError(f"tokens must be at least 1 and at most {MAX_NEW_TOKENS}, got {tokens}.")
        lines: list[dict[str, Any]] = []
        with hold_model_lock(self._model_lock, alive):
            for one in generate_tokens(adapter, text, tokens, temperature, seed):
                if isinstance(one, RecordedText):
                    story = {"text": text, "tokens": tokens, "temperature": temperature, "seed": seed, "lines": lines}
                    yield {"recording": summarize_entry(self.add_entry(self.make_story_entry(one, story)))}
                else:
                    lines.append(one)
                    yield one

    def make_story_entry(self, read: RecordedText, story: dict[str, Any]) -> RecordingEntry:
        """Make the entry of a text that the model wrote; its id states what was written, and how."""
        name = make_id(read.recording.model, story["text"], [self._model_id(), encode_json(story)])
        return RecordingEntry(name, read.recording, None, read.notes, story["text"] or None, self.scores, read.ids, story)

    def get_story(self, name: str) -> dict[str, Any]:
        """Return the prompt of a text that the model wrote here, how it was sampled, and its lines."""
        story = self.get_entry(name).story
        if story is None:
            raise MissingError("this text was not written here: generate one and try again.")
        return story

    def require_model(self, text: str) -> ModelAdapter | TranslatorAdapter:
        """Return the model. Raises ConfigError where there is none or the text is too long."""
        if self.adapter is None:
            raise ConfigError("this page has no model to run: start it with regard serve --model NAME.")
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(
                f"the text has {len(text):,} characters, but the page reads at most {MAX_CHARACTERS:,}: shorten it."
            )
        return self.adapter


def get_limits() -> dict[str, int]:
    """Return the limits of requests."""
    return {"characters": MAX_CHARACTERS, "tokens": MAX_NEW_TOKENS, "steps": MAX_STEP_WORDS}


@functools.cache
def list_examples() -> list[dict[str, str]]:
    """List the lectures' examples by name."""
    found = {name: lectures.build_example(name).title for name in lectures.EXAMPLES}
    return [{"name": name, "title": title, "summary": lectures.summarize_example(name)} for name, title in found.items()]
