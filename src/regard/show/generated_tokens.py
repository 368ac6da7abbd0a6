"""Generated text token by token: the probability of each token, the likeliest alternatives, and what it attends to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.generate import TokenChoice
from regard.observe import Recording

ROWS = 64  # queries whose weights are computed at a time
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
    """A new token: its id, text and probability, and the likeliest tokens, which may include it."""

    token: int
    word: str
    probability: float
    likeliest: list[tuple[str, float]]


def describe_tokens(steps: Iterator[TokenChoice], text: PieceTokenizer, top: int = 0) -> Iterator[GeneratedToken]:
    """Generate each new token of one sequence with the `top` likeliest in its place."""
    for chosen in steps:
        token = int(chosen.tokens)
        (word,) = text.pieces([token])
        likeliest = list_likeliest(chosen, top, text) if top else []
        yield GeneratedToken(token, word, float(chosen.log_probabilities.exp()), likeliest)


def list_likeliest(chosen: TokenChoice, n: int, text: PieceTokenizer) -> list[tuple[str, float]]:
    """Return the n likeliest tokens and their probabilities."""
    tokens, values = chosen.top(n)
    return list(zip(text.pieces(tokens[0].tolist()), values[0].exp().tolist(), strict=True))


def list_attended(recording: Recording, layers: int, words: Sequence[str], first: int) -> list[list[AttendedToken]]:
    """List what each query from `first` on attends to most, by the mean over the heads of the last `layers` layers recorded.

    The recording is of a run over a whole text, whose words are `words`. A token is chosen after the query before it.
    """
    count = len(recording.layers())
    maps = [recording.map(layer) for layer in range(count - layers, count)]
    heads, queries = sum(one.shape[1] for one in maps), maps[0].shape[2]
    attended = []
    for start in range(first, queries, ROWS):  # a long text has more weights than fit into memory
        rows = torch.stack([one[0, :, start : start + ROWS].sum(0) for one in maps]).sum(0) / heads
        attended += [list_largest(row[: start + n + 1], words) for n, row in enumerate(rows)]
    return attended


def list_largest(row: Tensor, words: Sequence[str]) -> list[AttendedToken]:
    """List the largest weights of a row (k,)."""
    values, places = row.topk(min(MAX_ATTENDED, len(row)))
    return [AttendedToken(at, words[at], value) for value, at in zip(values.tolist(), places.tolist(), strict=True)]


def select_last_layers(count: int) -> range:
    """Return the last quarter of `count` layers, at least one."""
    return range(count - max(1, count // 4), count)
