"""Generated text token by token: the probability of each token, the likeliest alternatives, and what it attends to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.generate import TokenChoice
from regard.map import AttentionMap
from regard.map.implicit_map import ImplicitMap
from regard.observe import Recording
from regard.show.axis_words import choose_attention_kind
from regard.show.page.implicit_pictures import build_implicit_map, list_implicit_layers

ROWS = 64  # queries whose weights are computed at a time
MAX_ENTRIES = 2**22  # of a layer that are computed at a time
MAX_ATTENDED = 4  # attended tokens that are listed for a new one


class PieceTokenizer(Protocol):
    """A tokenizer that returns the text of each token."""

    def pieces(self, ids: Any) -> list[str]:
        """Return the text of each token id."""


@dataclass(frozen=True)
class AttendedToken:
    """A token that is attended to: its position, its text, and the weight on it; signed without a softmax."""

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

    The recording is of a run over a whole text, whose words are `words`. A token is chosen after the query before it. Raises
    ConfigError if no layer was recorded.
    """
    maps = find_last_maps(recording, layers, len(words))
    heads, queries = sum(one.shape[1] for one in maps), maps[0].shape[2]
    attended, step = [], max(1, min(ROWS, MAX_ENTRIES // (max(one.shape[1] for one in maps) * queries)))
    for start in range(first, queries, step):  # a long text has more weights than fit into memory
        rows = torch.stack([one[0, :, start : start + step].sum(0) for one in maps]).sum(0) / heads
        attended += [list_largest(row[: start + n + 1], words) for n, row in enumerate(rows)]
    return attended


def find_last_maps(recording: Recording, layers: int, tokens: int) -> list[AttentionMap | ImplicitMap]:
    """Return the maps of the last `layers` layers; without any softmax, those of the last quarter of the other layers."""
    count = len(recording.layers())
    if count:
        return [recording.map(layer) for layer in range(count - layers, count)]
    found = [one for one in list_implicit_layers(recording.last)[0] if one.shape[2:] == (tokens, tokens)]
    if not found:
        choose_attention_kind(recording, "self")  # raises the error that states why there is none
    return [build_implicit_map(recording.last, found[n].calls) for n in select_last_layers(len(found))]


def list_largest(row: Tensor, words: Sequence[str]) -> list[AttendedToken]:
    """List the weights of a row (k,) that are largest in size."""
    places = row.abs().topk(min(MAX_ATTENDED, len(row))).indices
    return [AttendedToken(at, words[at], value) for value, at in zip(row[places].tolist(), places.tolist(), strict=True)]


def select_last_layers(count: int) -> range:
    """Return the last quarter of `count` layers, at least one."""
    return range(count - max(1, count // 4), count)
