"""The recordings and the opened heads of a page, within memory limits."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from regard.show.page import memory_size
from regard.show.page.head_pictures import OpenedHead
from regard.show.page.params import MissingError
from regard.show.page.recording_entry import WITHOUT_FIRST, HeadPlace, RecordingEntry, summarize_entry

MAX_TYPED = 32  # maximum recordings of typed texts
MAX_TYPED_BYTES = 16 * 2**20  # maximum bytes of recordings of typed texts; the newest is always kept
MAX_OPENED_BYTES = 120 * 2**20  # maximum bytes of opened heads; the newest is always kept


class RecordingStore:
    """Recordings by id and the opened heads; several threads may use it at once. Recordings with `pinned` ids always stay."""

    def __init__(self, pinned: Iterable[str] = ()) -> None:
        self._entries: OrderedDict[str, RecordingEntry] = OrderedDict()
        self._opened: OrderedDict[tuple[str, HeadPlace], OpenedHead] = OrderedDict()
        self._listed: list[str] = []  # for all visitors
        self._pinned = set(pinned)
        self._lock = threading.RLock()

    @property
    def listed(self) -> list[str]:
        """The ids of the recordings that all visitors see; those of the requests are seen by who asks for their ids."""
        with self._lock:
            return [name for name in self._listed if name in self._entries]

    def summarize_recordings(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Summarize those of some recordings that are here."""
        with self._lock:
            return [summarize_entry(self._entries[name]) for name in names if name in self._entries]

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
        """Remove a recording and its opened heads."""
        del self._entries[name]
        for key in [key for key in self._opened if key[0].removesuffix(WITHOUT_FIRST) == name]:
            del self._opened[key]

    def get_entry(self, name: str) -> RecordingEntry:
        """Return a recording by its id, with ":rest" after it without its first key. Raises MissingError if it is not here."""
        known, hides_first = name.removesuffix(WITHOUT_FIRST), name.endswith(WITHOUT_FIRST)
        with self._lock:
            if known in self._entries:
                return self._entries[known].without_first if hides_first else self._entries[known]
        raise MissingError(
            f"there is no recording {name[:20]!r}; the oldest recordings of typed texts are removed to make room for new ones."
        )

    def open_head(self, entry: RecordingEntry, place: HeadPlace) -> OpenedHead:
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
