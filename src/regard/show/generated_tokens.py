"""Generated text token by token: the probability of each token, the likeliest alternatives, and what it attends to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from regard.generate import TokenChoice
from regard.observe import Recording

MAX_ATTENDED = 4  # attended tokens that are listed for a new one


class PieceTokenizer(Protocol):
    """A tokenizer that returns the text of each token."""

    def pieces(self, ids: Any) -> list[str]:
        """Return the text of each token id."""


@dataclass(frozen=True)
class AttendedToken:
    """A token that is attended to: its position, its text, and the weight on it."""

    position: int
    word: str
    weight: float


@dataclass(frozen=True)
class GeneratedToken:
    """A new token: its id, text and probability; the likeliest tokens, which may include it, and those it attends to most."""

    token: int
    word: str
    probability: float
    likeliest: list[tuple[str, float]]
    attended: list[AttendedToken]


def describe_tokens(
    steps: Iterator[TokenChoice],
    words: list[str],
    text: PieceTokenizer,
    top: int = 0,
    recording: Recording | None = None,
    layers: int = 0,
) -> Iterator[GeneratedToken]:
    """Generate each new token of one sequence; `words` are those of the prompt, to which each new one is appended.

    What a token attends to is the row of the token before it, the mean over all heads of the last `layers` layers recorded.
    """
    for chosen in steps:
        token = int(chosen.tokens)
        (word,) = text.pieces([token])
        links = find_attended(recording, layers, words) if recording is not None and layers else []
        yield GeneratedToken(
            token, word, float(chosen.log_probabilities.exp()), list_likeliest(chosen, top, text) if top else [], links
        )
        words.append(word)


def list_likeliest(chosen: TokenChoice, n: int, text: PieceTokenizer) -> list[tuple[str, float]]:
    """Return the n likeliest tokens and their probabilities."""
    tokens, values = chosen.top(n)
    return list(zip(text.pieces(tokens[0].tolist()), values[0].exp().tolist(), strict=True))


def find_attended(recording: Recording, layers: int, words: list[str]) -> list[AttendedToken]:
    """Return the tokens that the last query attends to most, by the mean over the heads of the last `layers` layers."""
    weights = torch.cat([call.map[0, :, -1] for call in recording.last.softmax_calls[-layers:]]).mean(0)
    first = len(words) - len(weights)
    values, places = weights.topk(min(MAX_ATTENDED, len(weights)))
    return [
        AttendedToken(first + at, words[first + at], value) for value, at in zip(values.tolist(), places.tolist(), strict=True)
    ]


def select_last_layers(count: int) -> range:
    """Return the last quarter of `count` layers, at least one."""
    return range(count - max(1, count // 4), count)
