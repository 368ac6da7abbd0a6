"""translate: a sentence in one language to the likeliest in another, by anything that reads the one and writes the other."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.errors import DataError
from regard.generate import beams as search
from regard.generate.beams import Found
from regard.generate.reader import device_of, rows_of
from regard.generate.sampling import checked, wide
from regard.mechanism.arguments import check_count

END = "⟨end⟩"  # how the token that ends a sentence is shown
TIMES, MORE = 2, 10  # a translation has at most so many times the tokens of its source, and so many more


class State(Protocol):
    """How far a translator has come with each sentence of a batch."""

    def rows(self, index: Tensor) -> "State":
        """The state of these rows, one of which may be there several times."""


class Translator(Protocol):
    """A model that reads sentences of one language, and says what may come next in the other.

    A source is [w1 ... wn, end]; a target is read as [end, w1 ... wn] and foretold as [w1 ... wn, end].
    """

    text: Any  # a regard.text.BytePair, or None
    sizes: dict[str, Any]  # the arguments that make it again

    @property
    def context(self) -> int | None:
        """The most tokens it reads, of source or target; None where there is no bound."""

    def __call__(self, sources: Tensor, lengths: Any, targets: Tensor) -> Tensor:
        """The logits (b, t, n) of what comes after each target token."""

    def encode(self, sources: Tensor, lengths: Any) -> Any:
        """What it makes of sources (b, s), of which the first lengths (b,) are no padding."""

    def begin(self, memory: Any) -> Any:
        """The state before a target token is read."""

    def read(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The logits (b, n) of what comes after tokens (b,), and the state."""


@torch.no_grad()
def translate(
    model: Translator,
    sources: Sequence[Sequence[int]],
    *,
    beams: int = 1,
    longest: int | None = None,
    length_penalty: float = 1.0,
    end: int | None = None,
    batch: int = 64,
) -> list[Found]:
    """The translation of each source, its end among its tokens, and its score: log-probability / length ** length_penalty.

    sources are as the model was trained to read them, their end included; sentences of similar lengths go together, `batch`
    of them at a time, and none depends on the others. beams=1 takes the likeliest token each time; else a search keeps so
    many sentences. `longest` is the most tokens of a translation, twice those of its source and 10 more by default. `end` is
    the token that ends a sentence, model.text's own by default.
    """
    end = ending(model) if end is None else end
    check_count("beams", beams, most=search.MOST)
    check_count("batch", batch)
    search.check_penalty(length_penalty)
    if longest is not None:
        check_count("longest", longest)
    rows = rows_of(sources, model.sizes["vocabulary"]) if len(sources) else []
    limits = [bounded(model, TIMES * len(row) + MORE if longest is None else longest) for row in rows]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    found: dict[int, Found] = {}
    for start in range(0, len(order), batch):
        numbers = order[start : start + batch]
        results = found_in(model, [rows[n] for n in numbers], [limits[n] for n in numbers], beams, length_penalty, end)
        found |= dict(zip(numbers, results, strict=True))
    return [found[number] for number in range(len(rows))]


def found_in(
    model: Translator, rows: list[list[int]], limits: list[int], beams: int, length_penalty: float, end: int
) -> list[Found]:
    """The translations of one batch."""
    device = device_of(model)  # type: ignore[arg-type]  # any module has one
    lengths = [len(row) for row in rows]
    sources = torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in rows], device=device)
    state = model.begin(model.encode(sources, torch.tensor(lengths)))
    reader = Reader(model, state, device)
    first = reader.read([end] * len(rows))
    if beams == 1:
        return greedy(first, reader, limits, length_penalty, end)
    found = search.search(first, reader.step, beams, limits, lambda tokens: tokens[-1] == end, length_penalty)
    return [row[0] for row in found]


def greedy(first: Tensor, reader: "Reader", limits: list[int], length_penalty: float, end: int) -> list[Found]:
    """The likeliest token each time, until each row has met its end or its limit."""
    tokens: list[list[int]] = [[] for _ in limits]
    sums = [0.0] * len(limits)
    scores = first
    while True:
        best = scores.double().max(-1)
        for row, (score, token) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            if not over(tokens[row], limits[row], end):
                tokens[row].append(token)
                sums[row] += score
        if all(over(row, limit, end) for row, limit in zip(tokens, limits, strict=True)):
            return [Found(row, total / len(row) ** length_penalty) for row, total in zip(tokens, sums, strict=True)]
        scores = reader.read([row[-1] for row in tokens])


def over(tokens: list[int], limit: int, end: int) -> bool:
    """Whether a translation is at its end."""
    return len(tokens) == limit or tokens[-1:] == [end]


class Reader:
    """A translator and its state, which moves on with every token that is read."""

    def __init__(self, model: Translator, state: State, device: torch.device) -> None:
        self.model, self.state, self.device = model, state, device

    def read(self, tokens: list[int]) -> Tensor:
        """Reads a token of each row: the log-probabilities (b, n) of the next."""
        logits, self.state = self.model.read(torch.tensor(tokens, device=self.device), self.state)
        return checked(wide(logits)).log_softmax(-1)

    def step(self, parents: Tensor, tokens: list[int]) -> Tensor:
        """The same after rows have taken the place of these: beams that survived."""
        self.state = self.state.rows(parents.to(self.device))
        return self.read(tokens)


def ending(model: Translator) -> int:
    """The token that ends a sentence."""
    if model.text is None:
        raise DataError("this translator has no text: set model.text, a regard.text.BytePair, or say end=, its last token.")
    return int(model.text.end)


def bounded(model: Translator, longest: int) -> int:
    """At most what the model can read; the last token of a translation is not read, the one it begins with is."""
    return longest if model.context is None else min(longest, model.context)
