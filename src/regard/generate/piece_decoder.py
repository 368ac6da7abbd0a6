"""Pieces: bytes that come a token at a time, as text that can be shown: whole characters, and nothing of a stop string."""

import codecs
from collections.abc import Sequence


class PieceDecoder:
    """An incremental decoder that holds back incomplete characters and whatever may be the beginning of a stop string.

    Of several stop strings the one that is complete first counts, wherever the boundaries of tokens are.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = stops
        self.has_stopped = False  # whether a stop string was found
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, data: bytes, last: bool = False) -> str:
        """Return the text that is certain after more bytes; after the last, all of it, an incomplete character as U+FFFD."""
        if self.has_stopped:
            return ""
        text = self._held + self._decoder.decode(data, last)
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self.stops if stop in text]
        if found:
            self.has_stopped = True
            return text[: min(found)[1]]
        certain = len(text) - (0 if last else count_stop_prefix(text, self.stops))
        self._held = text[certain:]
        return text[:certain]


def count_stop_prefix(text: str, stops: Sequence[str]) -> int:
    """Return how many of the last characters of a text may be the beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)
