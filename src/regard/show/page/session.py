"""The recordings that a page shows, within a memory limit, and the model that makes more of them."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import regard.lectures.examples as lectures
from regard.errors import ConfigError
from regard.observe import Recording
from regard.show.page import size, translating
from regard.show.page.asked import MissingError
from regard.show.page.entry import Entry, Place, summary
from regard.show.page.examined import examined
from regard.show.page.pictures import Alive, Opened
from regard.show.page.speaker import Speaker, sentences, typed, writes, written
from regard.show.page.translating import Translating
from regard.show.page.turn import turn

TYPED = 32  # maximum recordings of typed texts
TYPED_BYTES = 16 * 2**20  # maximum bytes of recordings of typed texts; the newest is always kept
OPENED_BYTES = 120 * 2**20  # maximum bytes of opened heads; the newest is always kept
CHARACTERS = 20_000  # maximum characters of a text
TOKENS = 320  # maximum tokens generated at a time
READ = 2048  # maximum tokens read of a text, where the model's context is longer
STEPS = 64  # maximum words for which all steps of a head are shown
TRANSLATION = "translation"  # the id of the example's recording


class Session:
    """Recordings by id, the opened heads, and a model; several threads may use it at once."""

    def __init__(
        self, recording: Recording | None = None, speaker: Speaker | Translating | None = None, version: str = ""
    ) -> None:
        self.speaker, self.version = speaker, version
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._opened: OrderedDict[tuple[str, Place], Opened] = OrderedDict()
        self._lock, self._model = threading.RLock(), threading.Lock()
        self._count = 0
        self._kept = {TRANSLATION}  # these are never removed
        if recording is not None:
            self._kept.add(self.add(recording).id)

    def start(self) -> dict[str, Any]:
        """Return the initial state of the page."""
        with self._lock:
            recordings = [summary(entry) for name, entry in self._entries.items() if name != TRANSLATION]
        return {
            "version": self.version,
            "model": None if self.speaker is None else self.speaker.name,
            "writes": writes(self.speaker),
            "translates": isinstance(self.speaker, Translating),
            "translation": {"id": TRANSLATION, "sentence": translating.SENTENCE} if translating.carried() else None,
            "recordings": recordings,
            "sentences": sentences(self.speaker),
            "examples": examples(),
            "limits": limits(),
        }

    def add(
        self,
        recording: Recording,
        coming: list[dict[str, Any]] | None = None,
        notes: list[str] | None = None,
        name: str | None = None,
        text: str | None = None,
    ) -> Entry:
        """Store a recording; the oldest of the typed ones are removed where there are too many."""
        with self._lock:
            self._count += name is None
            entry = Entry(name or f"r{self._count}", recording, coming, notes or [], text)
            summary(entry)  # raises where the recording is not usable
            self._entries[entry.id] = entry
            mine = [one for one in self._entries.values() if one.id not in self._kept]
            while len(mine) > 1 and (len(mine) > TYPED or sum(size.of_recording(one.recording) for one in mine) > TYPED_BYTES):
                self.forget(mine.pop(0).id)
            return entry

    def forget(self, name: str) -> None:
        """Remove a recording and all that was computed from it."""
        del self._entries[name]
        for key in [key for key in self._opened if key[0] == name]:
            del self._opened[key]

    def entry(self, name: str) -> Entry:
        """Return a recording by its id. Raises MissingError where it does not exist."""
        with self._lock:
            if name in self._entries:
                return self._entries[name]
        raise MissingError(f"there is no recording {name[:20]!r} any more; the oldest of those typed make room for new ones.")

    def opened(self, entry: Entry, place: Place) -> Opened:
        """Return an opened head; the least recently used ones are removed to make room, before it is computed."""
        key = entry.id, replace(place, part=entry.attention(place).part)
        with self._lock:
            known = self._opened.get(key)
        made = known or Opened(*entry.known(place))  # outside of the lock: joining many calls takes a while
        with self._lock:
            self.entry(entry.id)  # raises if it was removed
            found = self._opened.setdefault(key, made)
            self._opened.move_to_end(key)
            while len(self._opened) > 1 and sum(one.nbytes for one in self._opened.values()) > OPENED_BYTES:
                self._opened.popitem(last=False)
            return found

    def heads(self) -> list[Opened]:
        """Return the opened heads."""
        with self._lock:
            return list(self._opened.values())

    def type(self, text: str, alive: Alive) -> dict[str, Any]:
        """Run the model on a text, and return the summary of the new recording."""
        speaker = self.running(text)
        own = None if isinstance(speaker, Translating) else text
        with turn(self._model, alive):
            return summary(self.add(*typed(speaker, text, READ), text=own))

    def examination(self, name: str, sees: str, alive: Alive) -> dict[str, Any]:
        """Examine the model on the first words of the text of a recording. Raises MissingError where that is not possible."""
        text = self.entry(name).text
        if text is None or self.speaker is None or isinstance(self.speaker, Translating):
            raise MissingError("who sees whom is asked of a model on what it read here: type a text, and ask again.")
        with turn(self._model, alive):
            return examined(self.speaker, text, sees)

    def translation(self, alive: Alive) -> dict[str, Any]:
        """Return the summary of the example's recording, made on the first request."""
        if not translating.carried():
            raise MissingError("this package carries no translator, so there is no translation to show.")
        with turn(self._model, alive):
            known = self._entries.get(TRANSLATION)
            return summary(known or self.add(translating.example(), name=TRANSLATION))

    def write(self, text: str, tokens: int, temperature: float, seed: int | None, alive: Alive) -> Iterator[dict[str, Any]]:
        """Generate text with the model, token by token, and yield the summary of its recording last."""
        speaker = self.running(text)
        if not 1 <= tokens <= TOKENS:
            raise ConfigError(f"tokens must be at least 1 and at most {TOKENS}, got {tokens}.")
        with turn(self._model, alive):
            for one in written(speaker, text, tokens, temperature, seed):
                yield {"recording": summary(self.add(one, text=text or None))} if isinstance(one, Recording) else one

    def running(self, text: str) -> Speaker | Translating:
        """Return the model. Raises ConfigError where there is none or the text is too long."""
        if self.speaker is None:
            raise ConfigError("this page has no model to run: start it with one, regard serve --model NAME.")
        if len(text) > CHARACTERS:
            raise ConfigError(f"the text has {len(text):,} characters; at most {CHARACTERS:,} are read.")
        return self.speaker


def limits() -> dict[str, int]:
    """Return the limits of requests."""
    return {"characters": CHARACTERS, "tokens": TOKENS, "steps": STEPS}


@functools.cache
def examples() -> list[dict[str, str]]:
    """List the lectures' examples by name."""
    found = {name: lectures.example(name).title for name in lectures.EXAMPLES}
    return [{"name": name, "title": title, "summary": lectures.summary(name)} for name, title in found.items()]
