"""The recordings that a page shows, and the models that make more of them."""

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

import regard.lectures.examples as lectures
from regard.errors import ConfigError
from regard.map.attribution_map import AttributionMap
from regard.observe import Recording
from regard.observe.classification.head_scores import UserScore
from regard.observe.head_table import Heads
from regard.probe.probe_heads import ProbeSettings, iterate_probe
from regard.show.page import attributions, gallery, translator_adapter, word_influence
from regard.show.page.effect_finding import find_text_effect
from regard.show.page.finding import LEAK, OpeningFinding, find_finding, find_head_finding
from regard.show.page.generation_loops import GenerationLoops
from regard.show.page.head_pictures import Alive
from regard.show.page.head_table import convert_row, describe_table
from regard.show.page.json_encoding import encode_json
from regard.show.page.model_adapter import (
    ModelAdapter,
    RecordedText,
    can_generate,
    generate_tokens,
    has_chat_template,
    list_sentences,
    record_text,
)
from regard.show.page.model_examination import examine_model
from regard.show.page.model_lock import PriorityLock, hold_model_lock
from regard.show.page.named_runs import NamedRuns
from regard.show.page.next_word_ablation import list_heads_off, predict_without_heads
from regard.show.page.params import MissingError
from regard.show.page.recording_entry import HeadPlace, RecordingEntry, summarize_entry
from regard.show.page.recording_id import encode_text, identify_model, identify_recording, make_id
from regard.show.page.recording_store import RecordingStore
from regard.show.page.translator_adapter import TranslatorAdapter

MAX_CHARACTERS = 20_000  # maximum characters of a text
MAX_NEW_TOKENS = 320  # maximum tokens generated at a time
MAX_READ_TOKENS = 2048  # maximum tokens read of a text, where the model's context is longer
MAX_STEP_WORDS = 64  # maximum words for which all steps of a head are shown
TELLING_LOSS = 0.5  # of a probability, with which a page opens
TRANSLATION_ID, LEAK_ID = "translation", "leak"  # the ids of the recordings of the gallery that are not of the page's model


@dataclass(frozen=True)
class GenerationRequest:
    """What a model is asked to write: `model` None is the first one; with `chat` the text is a message in its chat template.

    `run` is a name by which `Session.runs` stops it.
    """

    text: str
    tokens: int
    temperature: float
    seed: int | None = None
    model: str | None = None
    chat: bool = False
    run: str | None = None


class Session(RecordingStore):
    """Recordings, models that make more of them, and what was computed by these; several threads may use it at once."""

    def __init__(
        self,
        recording: Recording | RecordingEntry | None = None,
        adapter: ModelAdapter | TranslatorAdapter | None = None,
        version: str = "",
        scores: Sequence[UserScore] = (),
        others: Sequence[ModelAdapter | TranslatorAdapter] = (),
    ) -> None:
        super().__init__((TRANSLATION_ID, LEAK_ID))
        self.version, self.scores = version, scores
        self.loading: Callable[[], dict[str, Any]] | None = None  # describes what is loaded before the page can be shown
        self.add_models([one for one in (adapter, *others) if one is not None])
        self._attributions = attributions.AttributionCache()
        self._findings: dict[tuple[str, str | None], OpeningFinding | None] = {}  # by recording and the kind that is wanted
        self._probes: dict[str, Heads] = {}  # by model
        self.loops = GenerationLoops()
        self.runs = NamedRuns()
        self._projection_reasons: dict[str, str | None] = {}  # by model, once it is known
        self._model_lock, self._finding_lock = PriorityLock(), PriorityLock()
        self._model_id = functools.cache(lambda name: identify_model(self.adapters[name]))
        if recording is not None:
            self._pinned.add(self.add_recording(recording).id)

    def add_models(self, adapters: Sequence[ModelAdapter | TranslatorAdapter]) -> None:
        """Set the models that the page runs, the default first. Raises ConfigError where two have one name."""
        names = [one.name for one in adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two models of the page are called {twice}: their names must differ.")
        self.adapters = dict(zip(names, adapters, strict=True))
        self.adapter = adapters[0] if adapters else None

    def get_start_state(self) -> dict[str, Any]:
        """Return the initial state of the page, or what is loaded before there is one."""
        if self.loading is not None:
            return {"loading": self.loading()}
        return {
            "version": self.version,
            "model": None if self.adapter is None else self.adapter.name,
            "models": [
                {"name": name, "writes": can_generate(one), "chats": has_chat_template(one)}
                for name, one in self.adapters.items()
            ],
            "writes": any(map(can_generate, self.adapters.values())),
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

    def add_recording(self, recording: Recording | RecordingEntry) -> RecordingEntry:
        """Store a recording, or the entry of one, that all visitors see."""
        if isinstance(recording, Recording):
            recording = RecordingEntry(identify_recording(recording), recording, scores=self.scores)
        return self.add_entry(recording, is_listed=True)

    def remove_recording(self, name: str) -> None:
        """Remove a recording and all that was computed from it."""
        super().remove_recording(name)
        self._attributions.remove_recording(name)
        for wanted in [wanted for owner, wanted in self._findings if owner == name]:
            del self._findings[name, wanted]

    def run_text(self, text: str, alive: Alive, is_listed: bool = True, model: str | None = None) -> dict[str, Any]:
        """Run a model on a text, and return the summary of the recording; a text that was read is not read again."""
        adapter = self.require_model(text, model)
        own = None if isinstance(adapter, TranslatorAdapter) else text
        name = make_id(adapter.name, text, [self._model_id(adapter.name), encode_text(text)])
        with hold_model_lock(self._model_lock, alive):
            entry = self._entries.get(name)
            if entry is None:
                read = record_text(adapter, text, MAX_READ_TOKENS)
                other = None if adapter is self.adapter else adapter.name
                entry = RecordingEntry(
                    name, read.recording, read.next_words, read.notes, own, self.scores, read.ids, other_model=other
                )
            return summarize_entry(self.add_entry(entry, is_listed))

    def examine_recording(self, name: str, sees: str, alive: Alive) -> dict[str, Any]:
        """Examine the model on the first words of the text of a recording. Raises MissingError where that is not possible."""
        entry = self.get_entry(name)
        text, adapter = entry.text, self.find_adapter(entry)
        if text is None or adapter is None or isinstance(adapter, TranslatorAdapter):
            raise MissingError(
                "who may see whom can be examined only for a text that the model read here: type a text and try again."
            )
        with hold_model_lock(self._model_lock, alive):
            return examine_model(adapter, text, sees)

    def explain_settings(self, entry: RecordingEntry, alive: Alive) -> dict[str, str | None]:
        """Return for each setting why the page cannot show it for a recording, None where it can."""
        adapter, ids = self.require_attributable(entry, HeadPlace())
        if adapter.name not in self._projection_reasons:
            with hold_model_lock(self._model_lock, alive):
                self._projection_reasons[adapter.name] = attributions.explain_missing_projection(adapter, ids)
        return dict.fromkeys(attributions.SETTINGS) | {"carried": self._projection_reasons[adapter.name]}

    def get_target(self, entry: RecordingEntry, at: int | None, token: int | None, alive: Alive) -> attributions.Target:
        """Return the logit of a token after a position with its gradients; by default of the likeliest, after the last one.

        The first request runs the model on the text and the gradient backward, once.
        """
        adapter, ids = self.require_attributable(entry, HeadPlace())
        at = entry.get_shape(HeadPlace())[2] - 1 if at is None else at
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
        return attributions.describe_target(self.require_attributable(entry, HeadPlace())[0], found)

    def get_attribution_map(
        self, entry: RecordingEntry, place: HeadPlace, setting: str, at: int | None, token: int | None, alive: Alive
    ) -> AttributionMap:
        """Return the map (1, h, q, k) of a setting other than the weight, of all heads of a place's layer."""
        if setting == "pull" and entry.pull is not None:
            entry.get_shape(place)
            layer = place.kind, entry.get_layers(place).part, place.layer
            return entry.pull.get_map(layer).select(batch=place.b)
        self.require_attributable(entry, place)
        if setting != "carried":
            return self._attributions.get_map(entry, setting, place.layer, self.get_target(entry, at, token, alive))
        return self._attributions.get_map(entry, setting, place.layer, self.get_norms(entry, alive))

    def get_influence(self, entry: RecordingEntry, setting: str, at: int, token: int, alive: Alive) -> dict[str, Any]:
        """Return what every word did to the token after a position, by a setting; weights and norms are of that query alone."""
        self.require_attributable(entry, HeadPlace())
        if setting in ("weight", "carried"):
            norms = self.get_norms(entry, alive) if setting == "carried" else None
            return word_influence.encode_row(word_influence.average_last_rows(entry, at, norms))
        return word_influence.sum_influence(self.get_target(entry, at, token, alive).attribution, setting)

    def predict_without_heads(self, entry: RecordingEntry, off: Sequence[HeadPlace], at: int, alive: Alive) -> dict[str, Any]:
        """Return the tokens that come next after a position of a recording with all heads, and with some of them off."""
        adapter, ids = self.require_attributable(entry, HeadPlace())
        heads = list_heads_off(entry, off)
        with hold_model_lock(self._model_lock, alive):
            return {"words": predict_without_heads(adapter, ids, heads, at)}

    def stream_probe(self, entry: RecordingEntry, alive: Alive) -> Iterator[dict[str, Any]]:
        """Generate the progress of regard.probe_heads on the model that read a text, a line for each head, and the detectors.

        The model reads repeated random tokens once, and between two heads it is free for others; the result is stored.
        """
        adapter, _ = self.require_attributable(entry, HeadPlace())
        if adapter.name not in self._probes:
            items = iterate_probe(adapter.model, ProbeSettings())
            for item in self._model_lock.iterate(items, alive, priority=-math.inf):
                if isinstance(item, Heads):
                    self._probes[adapter.name] = item
                else:
                    yield {"progress": f"{item.done} of {item.of} heads {item.what}", "share": item.done / item.of}
        table = self._probes[adapter.name]
        for n, row in enumerate(table):
            yield {"done": n + 1, "of": len(table), "row": convert_row(row)}
        yield describe_table(table.detectors, table.notes)

    def get_norms(self, entry: RecordingEntry, alive: Alive) -> list[Tensor]:
        """Return how long the values of each layer are after the output projection, (1, h, k, 1), computed once."""
        adapter, ids = self.require_attributable(entry, HeadPlace())
        norms = self._attributions.find_norms(entry)
        if norms is None:
            with hold_model_lock(self._model_lock, alive):
                norms = self._attributions.find_norms(entry)
                if norms is None:
                    norms = attributions.compute_norms(adapter, ids)
                    self.get_entry(entry.id)  # raises if it was removed meanwhile
                    self._attributions.add_norms(entry, norms)
        return norms

    def require_attributable(self, entry: RecordingEntry, place: HeadPlace) -> tuple[ModelAdapter, Tensor]:
        """Return the model that read a recording and the tokens (1, t). Raises ConfigError where no gradient can be taken."""
        ids = attributions.require_ids(entry, place)
        adapter = self.find_adapter(entry)
        if adapter is None or isinstance(adapter, TranslatorAdapter):
            raise ConfigError("this page has no language model to run: start it with regard serve --model NAME.")
        return adapter, ids

    def find_adapter(self, entry: RecordingEntry) -> ModelAdapter | TranslatorAdapter | None:
        """Return the model that read the text of a recording."""
        return self.adapter if entry.other_model is None else self.adapters[entry.other_model]

    def get_translation(self, alive: Alive) -> dict[str, Any]:
        """Return the summary of the example's recording, made on the first request."""
        if not translator_adapter.has_example():
            raise MissingError("this package does not include a translator, so there is no translation to show.")
        return self.get_example(TRANSLATION_ID, translator_adapter.record_example, alive)

    def get_example(self, name: str, record: Callable[[], Recording], alive: Alive) -> dict[str, Any]:
        """Return the summary of a recording that is not of the page's model, made on the first request."""
        with hold_model_lock(self._model_lock, alive):
            entry = self._entries.get(name) or RecordingEntry(name, record(), scores=self.scores)
            return summarize_entry(self.add_entry(entry))

    def get_finding(self, entry: RecordingEntry, wanted: str | None, alive: Alive) -> OpeningFinding | None:
        """Return the finding of a recording, computed once: that of a text that a language model read is by effect.

        See `find_effect`, and `find_finding` for others and for the kind that is `wanted`.
        """
        with self._finding_lock.hold(alive):  # which no thread that has the model waits for
            if (entry.id, wanted) not in self._findings:
                found = self.measure_finding(entry, alive) if wanted is None and entry.ids is not None else None
                self._findings[entry.id, wanted] = found or find_finding(entry, alive, wanted)
            return self._findings[entry.id, wanted]

    def measure_finding(self, entry: RecordingEntry, alive: Alive) -> OpeningFinding | None:
        """Return the head without which the prediction falls most; the model is free for others between two heads."""
        adapter, _ = self.require_attributable(entry, HeadPlace())
        run_steps = partial(self._model_lock.iterate, alive=alive, priority=math.inf)
        return find_text_effect(adapter, entry, lambda: self.get_target(entry, None, None, alive), run_steps)

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

    def find_opening(self, alive: Alive) -> tuple[gallery.GalleryItem, RecordingEntry, OpeningFinding | None]:
        """Return the first item of the gallery of which a prediction needs one head, else that with the largest loss."""
        found: list[tuple[gallery.GalleryItem, RecordingEntry, OpeningFinding | None]] = []
        for item in gallery.list_openings(self.adapter):
            found.append((item, *self.make_item(item, alive)))
            if measure_loss(found[-1][2]) >= TELLING_LOSS:
                return found[-1]
        if not found:
            raise MissingError("this page has no text that its model can read: type one.")
        return max(found, key=lambda one: measure_loss(one[2]))

    def make_item(self, item: gallery.GalleryItem, alive: Alive) -> tuple[RecordingEntry, OpeningFinding | None]:
        """Make the recording of an item of the gallery, and its finding."""
        head = self.find_opening(alive)[2] if item.name == gallery.LONG else None  # before the long one, which has to stay
        if item.text:
            name = self.run_text(item.text, alive, is_listed=False)["id"]
        elif item.name == LEAK:
            name = self.get_example(LEAK_ID, gallery.record_leak, alive)["id"]
        else:
            name = self.get_translation(alive)["id"]
        entry = self.get_entry(name)
        if item.name != gallery.LONG:
            return entry, self.get_finding(entry, item.what, alive)
        return entry, None if head is None else find_head_finding(entry, head.place)

    def show_item(self, item: gallery.GalleryItem, entry: RecordingEntry, finding: OpeningFinding | None) -> dict[str, Any]:
        """Return an item of the gallery as JSON."""
        shown = None if finding is None else finding.to_dict()
        return {"name": item.name, "view": item.view, "recording": summarize_entry(entry), "finding": shown}

    def generate_text(self, asked: GenerationRequest, alive: Alive) -> Iterator[dict[str, Any]]:
        """Generate text with a model, token by token; its recording and what each token attends to come last.

        The first line says {"compiling": True} if the visitor has to wait for the loops that generation calls.
        """
        adapter = self.require_model(asked.text, asked.model)
        if not 1 <= asked.tokens <= MAX_NEW_TOKENS:
            raise ConfigError(f"tokens must be at least 1 and at most {MAX_NEW_TOKENS}, got {asked.tokens}.")
        with self.runs.open(asked.run) as stop:
            yield from self.loops.wait(adapter, alive)
            yield from self.write_story(adapter, asked, alive, stop)

    def write_story(
        self, adapter: ModelAdapter | TranslatorAdapter, asked: GenerationRequest, alive: Alive, stop: threading.Event
    ) -> Iterator[dict[str, Any]]:
        """Generate text until it is stopped; between two tokens the model is free for others, and newer texts go first."""
        lines: list[dict[str, Any]] = []
        settings = asked.text, asked.tokens, asked.temperature, asked.seed
        end = partial(self.runs.close, stop)
        tokens = generate_tokens(adapter, *settings, alive, asked.chat, stop.is_set, end)
        for one in self._model_lock.iterate(tokens, alive, priority=time.monotonic()):
            if isinstance(one, RecordedText):
                other = None if adapter is self.adapter else adapter.name
                lines = [{**line, "looked": looked} for line, looked in zip(lines, one.looked, strict=True)]
                written = replace(asked, tokens=len(lines)) if stop.is_set() else asked  # a link writes as many again
                entry = self.add_entry(self.make_story_entry(one, written, lines, other))
                yield {"recording": summarize_entry(entry), "looked": one.looked}
            else:
                lines.append(one)
                yield one

    def make_story_entry(
        self, read: RecordedText, asked: GenerationRequest, lines: list[dict[str, Any]], other: str | None
    ) -> RecordingEntry:
        """Make the entry of a text that a model wrote; its id states what was written, and how."""
        names = ("text", "tokens", "temperature", "seed", *(["chat"] if asked.chat else []))
        story = {name: getattr(asked, name) for name in names} | {"lines": lines}
        name = make_id(read.recording.model, asked.text, [self._model_id(read.recording.model), encode_json(story)])
        return RecordingEntry(
            name, read.recording, None, read.notes, asked.text or None, self.scores, read.ids, story, other_model=other
        )

    def get_story(self, name: str) -> dict[str, Any]:
        """Return the prompt of a text that the model wrote here, how it was sampled, and its lines."""
        story = self.get_entry(name).story
        if story is None:
            raise MissingError("this text was not written here: generate one and try again.")
        return story

    def require_model(self, text: str, name: str | None = None) -> ModelAdapter | TranslatorAdapter:
        """Return a model by its name, the first by default. Raises ConfigError where it is not here or the text is too long."""
        adapter = self.adapter if name is None else self.adapters.get(name)
        if name is not None and adapter is None:
            raise MissingError(f"this page has no model {name[:20]!r}; it has {', '.join(self.adapters) or 'none'}.")
        if adapter is None and self.loading is not None:
            raise ConfigError("the model of this page is still loaded: try again in a moment.")
        if adapter is None:
            raise ConfigError("this page has no model to run: start it with regard serve --model NAME.")
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(
                f"the text has {len(text):,} characters, but the page reads at most {MAX_CHARACTERS:,}: shorten it."
            )
        return adapter


def measure_loss(finding: OpeningFinding | None) -> float:
    """Return by how much a probability falls without the head of a finding, -1 where that was not measured."""
    return -1.0 if finding is None else finding.loss


def get_limits() -> dict[str, int]:
    """Return the limits of requests."""
    return {"characters": MAX_CHARACTERS, "tokens": MAX_NEW_TOKENS, "steps": MAX_STEP_WORDS}


@functools.cache
def list_examples() -> list[dict[str, str]]:
    """List the lectures' examples by name."""
    found = {name: lectures.build_example(name).title for name in lectures.EXAMPLES}
    return [{"name": name, "title": title, "summary": lectures.summarize_example(name)} for name, title in found.items()]
