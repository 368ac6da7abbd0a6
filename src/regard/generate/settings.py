"""Settings: all options of generation, checked once; and the test of whether a sequence has ended."""

from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from regard.errors import ConfigError
from regard.generate.beams import MAX_BEAMS, check_penalty
from regard.generate.sampling import Sampling, check_seed
from regard.generate.sequence_reader import Model, PrefixCache
from regard.generate.speculate import Lookup, check_draft
from regard.mechanism.arguments import check_count, check_instance, check_integer, describe_value

Stop = int | str | Sequence[int | str] | Set[int | str] | Tensor


class Tokenizer(Protocol):
    """A tokenizer, such as regard.text.BytePair."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of tokens."""


@dataclass(frozen=True, kw_only=True)
class Settings(Sampling):
    """How to continue a prompt: the fields of Sampling and those below."""

    beams: int = 1  # above 1: beam search with this many beams, nothing is drawn
    length_penalty: float = 1.0  # for beams: a sequence's score is its log-probability / length ** length_penalty
    seed: int | Sequence[int] | None = None  # makes draws reproducible; a list has one for each sequence
    stop: Stop | None = None  # tokens and strings at which a sequence ends, besides the end of text
    past: str = "refuse"  # beyond the context: an error, or "slide", see Reader
    after: PrefixCache | None = None  # what every sequence begins with, read once
    draft: Model | Lookup | None = None  # proposes tokens, of which the model checks several at once
    guesses: int = 4  # tokens that the draft proposes at a time
    end: int | None = None  # the end-of-text token
    text: Tokenizer | None = None  # the tokenizer, needed for strings to stop at

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beams", "guesses"):
            check_count(name, getattr(self, name), most=MAX_BEAMS)
        check_penalty(self.length_penalty)
        if self.seed is not None:
            check_seed(self.seed)
        if self.past not in ("refuse", "slide"):
            raise ConfigError(f'past must be "refuse" or "slide", got {self.past!r}.')
        if self.beams > 1 and (self.draft is not None or self.has_sampling_options):
            raise ConfigError("beam search does not sample: temperature, top_k, top_p, min_p and draft cannot be used with it.")
        if self.after is not None:
            check_instance("after", self.after, PrefixCache, "Use PrefixCache.read(model, tokens).")
        if self.draft is not None and not isinstance(self.draft, Lookup):
            check_draft(self.draft)
        if self.end is not None:
            object.__setattr__(self, "end", check_integer("end", self.end, ", a token, or None"))
        if any(word == "" for word in self.stops):
            raise ConfigError("a string to stop at must have at least one character, got an empty one.")
        if self.stop_strings and self.text is None:
            raise ConfigError(f"to stop at {self.stop_strings[0]!r} the model needs a vocabulary; give a token number instead.")

    @property
    def has_sampling_options(self) -> bool:
        """Whether top_k, top_p, min_p or a temperature other than 0 and 1 is set."""
        return self.temperature not in (0, 1) or (self.top_k, self.top_p, self.min_p) != (0, 1, 0)

    @cached_property
    def stops(self) -> list[int | str]:
        """All tokens and strings that a sequence stops at."""
        return list_stops(self.stop)

    @cached_property
    def stop_strings(self) -> list[str]:
        """The strings among `stops`."""
        return [one for one in self.stops if isinstance(one, str)]

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a sequence."""
        return frozenset(one for one in (self.end, *self.stops) if isinstance(one, int))

    def check_end_tokens(self, vocabulary: int) -> None:
        """Raise ConfigError if a token that ends a sequence is not one of a vocabulary."""
        for token in sorted(self.end_tokens):
            if not 0 <= token < vocabulary:
                name, numbers = "end" if token == self.end else "stop", f"numbered from 0 to {vocabulary - 1}"
                raise ConfigError(f"{name} has {describe_value(token)}, not a token of this model: they are {numbers}.")

    def has_ended(self, tokens: Sequence[int]) -> bool:
        """Return whether the last of the new tokens, given without the prompt, ends a sequence."""
        if tokens[-1] in self.end_tokens:
            return True
        if not self.stop_strings or self.text is None:
            return False
        stops = [one.encode() for one in self.stop_strings]
        tail = self.text.bytes(tokens[-max(map(len, stops)) :])  # a token has at least one byte
        return any(one in tail for one in stops)

    def padding_token(self, tokens: Sequence[int]) -> int:
        """Return the token that a sequence yields after its end."""
        return tokens[-1] if self.end is None else self.end


def list_stops(stop: object) -> list[int | str]:
    """Return a token, a text, or several of them, as a list; raise ConfigError for anything else."""
    if stop is None:
        return []
    with suppress(AttributeError, TypeError, RuntimeError):  # only dense tensors and arrays have a list
        stop = stop.tolist()  # type: ignore[attr-defined]
    ones = [stop] if isinstance(stop, str | bytes) or not isinstance(stop, Sequence | Set) else stop
    return [one if isinstance(one, str) else check_stop(one) for one in ones]


def check_stop(token: object) -> int:
    """Return a token to stop at, or raise ConfigError."""
    return check_integer("stop", token, " or a text, or a list of them")
