"""The recordings that a page shows, within a memory limit, and the model that makes more of them."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import regard.lectures.examples as lectures
from regard.errors import ConfigError
from regard.map.attribution_map import AttributionMap
from regard.observe import Recording
from regard.observe.head_scores import UserScore
from regard.show.page import attributions, memory_size, translator_adapter
from regard.show.page.head_pictures import Alive, OpenedHead
from regard.show.page.model_adapter import (
    ModelAdapter,
    can_generate,
    generate_tokens,
    list_sentences,
    read_tokens,
    record_text,
)
from regard.show.page.model_examination import examine_model
from regard.show.page.model_lock import hold_model_lock
from regard.show.page.params import MissingError
from regard.show.page.recording_entry import Place, RecordingEntry, summarize_entry
from regard.show.page.translator_adapter import TranslatorAdapter

MAX_TYPED = 32  # maximum recordings of typed texts
MAX_TYPED_BYTES = 16 * 2**20  # maximum bytes of recordings of typed texts; the newest is always kept
MAX_OPENED_BYTES = 120 * 2**20  # maximum bytes of opened heads; the newest is always kept
MAX_CHARACTERS = 20_000  # maximum characters of a text
MAX_NEW_TOKENS = 320  # maximum tokens generated at a time
MAX_READ_TOKENS = 2048  # maximum tokens read of a text, where the model's context is longer
MAX_STEP_WORDS = 64  # maximum words for which all steps of a head are shown
TRANSLATION_ID = "translation"  # the id of the example's recording


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
        self._projection_reason: list[str | None] = []  # one item once it is known
        self._lock, self._model_lock = threading.RLock(), threading.Lock()
        self._count = 0
        self._pinned = {TRANSLATION_ID}  # these are never removed
        if recording is not None:
            self._pinned.add(self.add_recording(recording).id)

    def get_start_state(self) -> dict[str, Any]:
        """Return the initial state of the page."""
        with self._lock:
            recordings = [summarize_entry(entry) for name, entry in self._entries.items() if name != TRANSLATION_ID]
        return {
            "version": self.version,
            "model": None if self.adapter is None else self.adapter.name,
            "writes": can_generate(self.adapter),
            "translates": isinstance(self.adapter, TranslatorAdapter),
            "translation": {"id": TRANSLATION_ID, "sentence": translator_adapter.SENTENCE}
            if translator_adapter.has_example()
            else None,
            "recordings": recordings,
            "sentences": list_sentences(self.adapter),
            "examples": list_examples(),
            "limits": get_limits(),
        }

    def add_recording(
        self,
        recording: Recording,
        coming: list[dict[str, Any]] | None = None,
        notes: list[str] | None = None,
        name: str | None = None,
        text: str | None = None,
    ) -> RecordingEntry:
        """Store a recording; the oldest of the typed ones are removed where there are too many."""
        with self._lock:
            self._count += name is None
            entry = RecordingEntry(name or f"r{self._count}", recording, coming, notes or [], text, self.scores)
            summarize_entry(entry)  # raises where the recording is not usable
            self._entries[entry.id] = entry
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
        made = known or OpenedHead(*entry.get_sized_map(place))  # outside of the lock: joining many calls takes a while
        with self._lock:
            self.get_entry(entry.id)  # raises if it was removed
            found = self._opened.setdefault(key, made)
            self._opened.move_to_end(key)
            while len(self._opened) > 1 and sum(one.nbytes for one in self._opened.values()) > MAX_OPENED_BYTES:
                self._opened.popitem(last=False)
            return found

    def list_opened(self) -> list[OpenedHead]:
        """Return the opened heads."""
        with self._lock:
            return list(self._opened.values())

    def run_text(self, text: str, alive: Alive) -> dict[str, Any]:
        """Run the model on a text, and return the summary of the new recording."""
        adapter = self.require_model(text)
        own = None if isinstance(adapter, TranslatorAdapter) else text
        with hold_model_lock(self._model_lock, alive):
            return summarize_entry(self.add_recording(*record_text(adapter, text, MAX_READ_TOKENS), text=own))

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
        adapter = self.require_attributable(entry, Place())
        if not self._projection_reason:
            with hold_model_lock(self._model_lock, alive):
                ids, _, _ = read_tokens(adapter, entry.text or "", MAX_READ_TOKENS)
                self._projection_reason.append(attributions.explain_missing_projection(adapter, ids))
        return dict.fromkeys(attributions.SETTINGS) | {"carried": self._projection_reason[0]}

    def get_target(self, entry: RecordingEntry, at: int | None, token: int | None, alive: Alive) -> attributions.Target:
        """Return the logit of a token after a position with its gradients; by default of the likeliest, after the last one.

        The first request runs the model on the text and the gradient backward, once.
        """
        adapter = self.require_attributable(entry, Place())
        at = entry.get_shape(Place())[2] - 1 if at is None else at
        known = self._attributions.find_target(entry, at, token)
        if known is not None:
            return known
        with hold_model_lock(self._model_lock, alive):
            found = self._attributions.find_target(entry, at, token)
            if found is None:
                ids, _, _ = read_tokens(adapter, entry.text or "", MAX_READ_TOKENS)
                found = attributions.compute_target(adapter, ids, entry, at, token)
                self.get_entry(entry.id)  # raises if it was removed meanwhile
                self._attributions.add_target(entry, found)
        return found

    def describe_target(self, entry: RecordingEntry, at: int | None, token: int | None, alive: Alive) -> dict[str, Any]:
        """Describe a target, see `get_target`."""
        found = self.get_target(entry, at, token, alive)
        return attributions.describe_target(self.require_attributable(entry, Place()), found)

    def get_attribution_map(
        self, entry: RecordingEntry, place: Place, setting: str, at: int | None, token: int | None, alive: Alive
    ) -> AttributionMap:
        """Return the map (1, h, q, k) of a setting other than the weight, of all heads of a place's layer."""
        adapter = self.require_attributable(entry, place)
        if setting != "carried":
            return self._attributions.get_map(entry, setting, place.layer, self.get_target(entry, at, token, alive))
        norms = self._attributions.find_norms(entry)
        if norms is None:
            with hold_model_lock(self._model_lock, alive):
                norms = self._attributions.find_norms(entry)
                if norms is None:
                    ids, _, _ = read_tokens(adapter, entry.text or "", MAX_READ_TOKENS)
                    norms = attributions.compute_norms(adapter, ids)
                    self.get_entry(entry.id)  # raises if it was removed meanwhile
                    self._attributions.add_norms(entry, norms)
        return self._attributions.get_map(entry, setting, place.layer, norms)

    def require_attributable(self, entry: RecordingEntry, place: Place) -> ModelAdapter:
        """Return the model that read a recording's text. Raises ConfigError where no gradient can be taken."""
        attributions.check_attributable(entry, place)
        if self.adapter is None or isinstance(self.adapter, TranslatorAdapter):
            raise ConfigError("this page has no language model to run: start it with regard serve --model NAME.")
        return self.adapter

    def get_translation(self, alive: Alive) -> dict[str, Any]:
        """Return the summary of the example's recording, made on the first request."""
        if not translator_adapter.has_example():
            raise MissingError("this package does not include a translator, so there is no translation to show.")
        with hold_model_lock(self._model_lock, alive):
            known = self._entries.get(TRANSLATION_ID)
            return summarize_entry(known or self.add_recording(translator_adapter.record_example(), name=TRANSLATION_ID))

    def generate_text(
        self, text: str, tokens: int, temperature: float, seed: int | None, alive: Alive
    ) -> Iterator[dict[str, Any]]:
        """Generate text with the model, token by token, and yield the summary of its recording last."""
        adapter = self.require_model(text)
        if not 1 <= tokens <= MAX_NEW_TOKENS:
            raise ConfigError(f"tokens must be at least 1 and at most {MAX_NEW_TOKENS}, got {tokens}.")
        with hold_model_lock(self._model_lock, alive):
            for one in generate_tokens(adapter, text, tokens, temperature, seed):
                yield (
                    {"recording": summarize_entry(self.add_recording(one, text=text or None))}
                    if isinstance(one, Recording)
                    else one
                )

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
