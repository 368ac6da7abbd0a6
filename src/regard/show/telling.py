"""Generated text token by token: the probability of each token, the likeliest alternatives, and what it attends to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.generate import Chosen
from regard.observe import Recording

LOOKED = 4  # attended tokens that are listed for a new one


class Pieces(Protocol):
    """A tokenizer that returns the text of each token."""

    def pieces(self, ids: Any) -> list[str]:
        """Return the text of each token id."""


@dataclass(frozen=True)
class Looked:
    """A token that is attended to: its position, its text, and the weight on it."""

    place: int
    word: str
    weight: float


@dataclass(frozen=True)
class Told:
    """A new token: its id, text and probability; the likeliest tokens, which may include it, and those it attends to most."""

    token: int
    word: str
    probability: float
    likeliest: list[tuple[str, float]]
    looked: list[Looked]


def told(
    steps: Iterator[Chosen], words: list[str], text: Pieces, top: int = 0, recording: Recording | None = None, layers: int = 0
) -> Iterator[Told]:
    """Generate each new token of one sequence; `words` are those of the prompt, to which each new one is appended.

    What a token attends to is the row of the token before it, the mean over all heads of the last `layers` layers recorded.
    """
    for chosen in steps:
        token = int(chosen.tokens)
        (word,) = text.pieces([token])
        looked = looked_at(recording, layers, words) if recording is not None and layers else []
        yield Told(token, word, float(chosen.log_probabilities.exp()), likeliest(chosen, top, text) if top else [], looked)
        words.append(word)


def likeliest(chosen: Chosen, n: int, text: Pieces) -> list[tuple[str, float]]:
    """Return the n likeliest tokens and their probabilities."""
    tokens, values = chosen.top(n)
    return list(zip(text.pieces(tokens[0].tolist()), values[0].exp().tolist(), strict=True))


def looked_at(recording: Recording, layers: int, words: list[str]) -> list[Looked]:
    """Return the tokens that the last query attends to most, by the mean over the heads of the last `layers` layers."""
    weights = mean_row([call.map[0, :, -1] for call in recording.last.calls[-layers:]])
    first = len(words) - len(weights)
    values, places = weights.topk(min(LOOKED, len(weights)))
    return [Looked(first + at, words[first + at], value) for value, at in zip(values.tolist(), places.tolist(), strict=True)]


def mean_row(rows: list[Tensor]) -> Tensor:
    """Compute the mean of weights (h, k) over heads and layers, (k,)."""
    return torch.cat(rows).mean(0)


def last_layers(count: int) -> range:
    """Return the last quarter of `count` layers, at least one."""
    return range(count - max(1, count // 4), count)
