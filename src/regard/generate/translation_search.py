"""translate: a sentence in one language to the likeliest in another, by any translator model."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.errors import DataError
from regard.generate import beams as search
from regard.generate.beams import Hypothesis
from regard.generate.sampling import check_logits, widen_logits
from regard.generate.sequence_reader import find_device, list_token_rows
from regard.mechanism.arguments import check_count

END_LABEL = "⟨end⟩"  # the end-of-sentence token as displayed
LENGTH_FACTOR, EXTRA_LENGTH = 2, 10  # a translation has at most TIMES the tokens of its source plus MORE


class DecoderState(Protocol):
    """The decoder's state for each sentence of a batch."""

    def select_rows(self, index: Tensor) -> "DecoderState":
        """Return the state of these rows, which may repeat."""


class Translator(Protocol):
    """A model that reads sentences of one language, and gives the logits of the next token in another.

    A source is [w1 ... wn, end]; a target is read as [end, w1 ... wn] and predicted as [w1 ... wn, end].
    """

    text: Any  # a regard.text.BytePair, or None
    sizes: dict[str, Any]  # the arguments of its constructor

    @property
    def context(self) -> int | None:
        """The most tokens of a source or target; None if there is no bound."""

    def __call__(self, sources: Tensor, lengths: Any, targets: Tensor) -> Tensor:
        """Return the logits (b, t, n) of what comes after each target token."""

    def encode(self, sources: Tensor, lengths: Any) -> Any:
        """Encode sources (b, s), of which the first lengths (b,) are no padding."""

    def begin(self, memory: Any) -> Any:
        """Return the state before the first target token."""

    def read(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the logits (b, n) of what comes after tokens (b,), and the new state."""


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
) -> list[Hypothesis]:
    """Translate each source; return the tokens, the end among them, and the score: log-probability / length ** length_penalty.

    sources are as the model was trained to read them, their end included; sentences of similar lengths are batched, `batch` at
    a time, and the results do not depend on each other. beams=1 takes the likeliest token each time; more is a beam search.
    `longest` is the most tokens of a translation, twice those of its source and 10 more by default. `end` is the token that
    ends a sentence, model.text's own by default.
    """
    end = get_end_token(model) if end is None else end
    check_count("beams", beams, most=search.MAX_BEAMS)
    check_count("batch", batch)
    search.check_penalty(length_penalty)
    if longest is not None:
        check_count("longest", longest)
    rows = list_token_rows(sources, model.sizes["vocabulary"]) if len(sources) else []
    limits = [LENGTH_FACTOR * len(row) + EXTRA_LENGTH if longest is None else longest for row in rows]
    limits = limits if model.context is None else [min(limit, model.context) for limit in limits]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    found: dict[int, Hypothesis] = {}
    for start in range(0, len(order), batch):
        numbers = order[start : start + batch]
        results = translate_batch(model, [rows[n] for n in numbers], [limits[n] for n in numbers], beams, length_penalty, end)
        found |= dict(zip(numbers, results, strict=True))
    return [found[number] for number in range(len(rows))]


def translate_batch(
    model: Translator, rows: list[list[int]], limits: list[int], beams: int, length_penalty: float, end: int
) -> list[Hypothesis]:
    """Return the translations of one batch."""
    device = find_device(model)  # type: ignore[arg-type]  # any module has one
    lengths = [len(row) for row in rows]
    sources = torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in rows], device=device)
    state = model.begin(model.encode(sources, torch.tensor(lengths)))
    reader = TranslatorReader(model, state, device)
    first = reader.read([end] * len(rows))
    if beams == 1:
        return search_greedily(first, reader, limits, length_penalty, end)
    found = search.search_beams(first, reader.reorder_and_read, beams, limits, lambda tokens: tokens[-1] == end, length_penalty)
    return [row[0] for row in found]


def search_greedily(
    first: Tensor, reader: "TranslatorReader", limits: list[int], length_penalty: float, end: int
) -> list[Hypothesis]:
    """Take the likeliest token each time, until each row has reached its end or its limit."""
    tokens: list[list[int]] = [[] for _ in limits]
    sums = [0.0] * len(limits)
    scores = first
    while True:
        best = scores.double().max(-1)
        for row, (score, token) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            if not is_complete(tokens[row], limits[row], end):
                tokens[row].append(token)
                sums[row] += score
        if all(is_complete(row, limit, end) for row, limit in zip(tokens, limits, strict=True)):
            return [Hypothesis(row, total / len(row) ** length_penalty) for row, total in zip(tokens, sums, strict=True)]
        scores = reader.read([row[-1] for row in tokens])


def is_complete(tokens: list[int], limit: int, end: int) -> bool:
    """Return whether a translation is complete."""
    return len(tokens) == limit or tokens[-1:] == [end]


class TranslatorReader:
    """A translator and its state, which advances with every token that is read."""

    def __init__(self, model: Translator, state: DecoderState, device: torch.device) -> None:
        self.model, self.state, self.device = model, state, device

    def read(self, tokens: list[int]) -> Tensor:
        """Read a token of each row; return the log-probabilities (b, n) of the next."""
        logits, self.state = self.model.read(torch.tensor(tokens, device=self.device), self.state)
        return check_logits(widen_logits(logits)).log_softmax(-1)

    def reorder_and_read(self, parents: Tensor, tokens: list[int]) -> Tensor:
        """Replace the rows by copies of their parents, beams that survived, then read a token of each as `read` does."""
        self.state = self.state.select_rows(parents.to(self.device))
        return self.read(tokens)


def get_end_token(model: Translator) -> int:
    """Return the token that ends a sentence."""
    if model.text is None:
        raise DataError("this translator has no vocabulary: set model.text to a BytePair, or give the last token as end=.")
    return int(model.text.end)
