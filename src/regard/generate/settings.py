"""Settings: everything that may be said of how to go on, checked once; and where a sequence ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from regard.errors import ConfigError
from regard.generate.beams import MOST, check_penalty
from regard.generate.reader import Model, Opening
from regard.generate.sampling import Sampling, check_seed
from regard.generate.speculate import Lookup
from regard.mechanism.arguments import check_count

Stop = int | str | Sequence[int | str]


class Text(Protocol):
    """Words to numbers and back, as regard.text.BytePair does it."""

    def encode(self, text: str) -> list[int]:
        """The numbers of a text."""

    def bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes that numbers stand for."""


@dataclass(frozen=True, kw_only=True)
class Settings(Sampling):
    """How to go on from a prompt: how a token is drawn, and what is below."""

    beams: int = 1  # more than 1: the likeliest sequence that a beam search of so many finds, nothing drawn
    length_penalty: float = 1.0  # of beams: a sequence's score is its log-probability / length ** length_penalty
    seed: int | Sequence[int] | None = None  # the same again from the same; a list has one for each sequence
    stop: Stop | None = None  # tokens and strings at which a sequence ends, beside the end of text
    past: str = "refuse"  # beyond the context: an error, or "slide", see Reader
    after: Opening | None = None  # what every sequence begins with, read once
    draft: Model | Lookup | None = None  # guesses what comes, for the model to check several tokens at once
    guesses: int = 4  # of the draft, at a time
    end: int | None = None  # the end-of-text token
    text: Text | None = None  # words to numbers and back, for strings to stop at

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beams", "guesses"):
            check_count(name, getattr(self, name), most=MOST)
        check_penalty(self.length_penalty)
        if self.seed is not None:
            check_seed(self.seed)
        if self.past not in ("refuse", "slide"):
            raise ConfigError(f'past must be "refuse" or "slide", got {self.past!r}.')
        if self.beams > 1 and (self.draft is not None or self.drawn):
            raise ConfigError("beams draw nothing: temperature, top_k, top_p, min_p and draft do not go with them.")
        if any(word == "" for word in self.stops):
            raise ConfigError("a string to stop at must have a character, got an empty one.")
        if self.strings and self.text is None:
            raise ConfigError(f"to stop at {self.strings[0]!r} the model needs its text; give the number of a token instead.")

    @property
    def drawn(self) -> bool:
        """Whether something was said of how to draw a token."""
        return self.temperature not in (0, 1) or (self.top_k or 0, self.top_p, self.min_p) != (0, 1, 0)

    @cached_property
    def stops(self) -> list[int | str]:
        """All that a sequence stops at."""
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, int | str) else list(self.stop)

    @cached_property
    def strings(self) -> list[str]:
        """The strings among them."""
        return [one for one in self.stops if isinstance(one, str)]

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a sequence."""
        return frozenset(one for one in (self.end, *self.stops) if isinstance(one, int))

    def ended(self, tokens: Sequence[int]) -> bool:
        """Whether new tokens, those of the prompt left out, end with the last of them."""
        if tokens[-1] in self.ends:
            return True
        if not self.strings or self.text is None:
            return False
        stops = [one.encode() for one in self.strings]
        tail = self.text.bytes(tokens[-max(map(len, stops)) :])  # a token has at least one byte
        return any(one in tail for one in stops)

    def padding(self, tokens: Sequence[int]) -> int:
        """What a sequence that has ended goes on with."""
        return tokens[-1] if self.end is None else self.end
