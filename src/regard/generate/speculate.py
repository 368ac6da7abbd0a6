"""Speculative decoding: a draft guesses a few tokens, and the model checks them all at once.

A guess x, drawn from the draft's distribution q, is kept with probability min(1, p(x) / q(x)), where p is the model's;
otherwise the token is drawn from max(p - q, 0), and the guesses after it are dropped. The result has exactly the
distribution p, whatever the draft. Source: Leviathan et al. 2023; Chen et al. 2023.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.generate.sampling import RowGenerators, Sampling, draw_tokens
from regard.generate.sequence_reader import Model, SequenceReader
from regard.mechanism.arguments import describe_value


@dataclass(frozen=True)
class Lookup:
    """A draft without a model: the tokens that followed an earlier occurrence of the last `longest` tokens or fewer.

    It costs nothing, and guesses well if a text repeats itself: names, code, a question quoted in its answer.
    """

    longest: int = 3

    def __post_init__(self) -> None:
        if type(self.longest) is not int or self.longest < 1:
            raise ConfigError(f"Lookup(longest) must be a whole number of at least 1, got {self.longest!r}.")

    def find_continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens: those after the latest earlier place of the longest run of last tokens, or []."""
        for size in range(min(self.longest, len(tokens) - 1), 0, -1):
            run = list(tokens[-size:])
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == run:
                    return list(tokens[start + size : start + size + count])
        return []


Guess = tuple[int, Tensor | None]  # a token, and the distribution (n,) it was drawn from; None if it is certain


class Guesser(Protocol):
    """What guesses the next tokens."""

    def guess(self, tokens: list[int], count: int) -> list[Guess]:
        """Guess up to `count` tokens."""


class LookupGuesser:
    """Guesses by Lookup."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup

    def guess(self, tokens: list[int], count: int) -> list[Guess]:
        """Return what followed an earlier occurrence."""
        return [(token, None) for token in self.lookup.find_continuation(tokens, count)]


class ModelGuesser:
    """Guesses by a smaller model, drawn by the same sampling settings as those of the model that checks."""

    def __init__(self, model: Model, room: int, sampling: Sampling, dice: RowGenerators) -> None:
        self.reader, self.sampling, self.dice = SequenceReader(model, room), sampling, dice

    def guess(self, tokens: list[int], count: int) -> list[Guess]:
        """Generate up to `count` tokens with the draft model."""
        known = self.reader.rows[0]
        common = next((n for n, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), min(len(known), len(tokens)))
        self.reader.crop(min(common, len(tokens) - 1))
        new = tokens[len(self.reader.rows[0]) :]
        found: list[Guess] = []
        for _ in range(min(count, self.reader.capacity - len(tokens) + 1)):
            q = self.sampling.compute_probabilities(self.reader.read([new]), self.reader.rows)
            token = int(draw_tokens(q, self.dice.draw_uniform()))
            found.append((token, q[0]))
            new = [token]
        return found


def make_guesser(draft: Model | Lookup, model: Model, capacity: int, sampling: Sampling, generators: RowGenerators) -> Guesser:
    """Return the guesser of a draft; raise ConfigError if its vocabulary is not the model's."""
    if isinstance(draft, Lookup):
        return LookupGuesser(draft)
    if draft.config.vocabulary != model.config.vocabulary:
        raise ConfigError(
            f"a draft must have the model's vocabulary, {model.config.vocabulary} tokens; it has {draft.config.vocabulary}."
        )
    return ModelGuesser(draft, capacity, sampling, generators)


def check_draft(draft: object) -> None:
    """Raise ConfigError if a draft is not a model with its sizes."""
    sizes = getattr(draft, "config", None)
    if not callable(draft) or not all(hasattr(sizes, name) for name in ("layers", "context", "vocabulary")):
        raise ConfigError(
            f"draft must be Lookup() or a model whose config has layers, context and vocabulary; got {describe_value(draft)}."
        )


def speculate_tokens(
    reader: SequenceReader,
    prompt: list[int],
    most: int,
    guesser: Guesser,
    guesses: int,
    sampling: Sampling,
    generators: RowGenerators,
) -> Iterator[tuple[int, Tensor]]:
    """Yield up to `most` tokens of one sequence, each with the model's logits (n,) before it."""
    new = prompt
    while most > 0:
        tokens = [*reader.rows[0], *new]
        count = max(min(guesses, most - 1, reader.capacity - len(tokens)), 0)
        guessed = guesser.guess(tokens, count) if count else []
        read = reader.read([[*new, *(token for token, _ in guessed)]], last=len(guessed) + 1)
        logits = read.view(len(guessed) + 1, -1)
        for place in range(len(guessed) + 1):
            p = sampling.compute_probabilities(logits[place : place + 1], [tokens])[0]
            token, is_accepted = accept_or_draw(p, guessed[place] if place < len(guessed) else None, generators)
            most -= 1
            tokens.append(token)
            if not is_accepted:
                reader.crop(len(tokens) - 1)  # the last token is not read yet
            yield token, logits[place]
            if not is_accepted:
                new = [token]
                break


def accept_or_draw(p: Tensor, guess: Guess | None, generators: RowGenerators) -> tuple[int, bool]:
    """Return the guess and True if it is accepted; else a token drawn in its place, or without a guess, and False."""
    if guess is not None:
        token, q = guess
        q = torch.zeros_like(p).index_fill(0, torch.tensor(token, device=p.device), 1) if q is None else q.to(p)
        if float(generators.draw_uniform()) * float(q[token]) < float(p[token]):
            return token, True
        rest = (p - q).clamp(min=0)
        p = rest if bool(rest.sum() > 0) else p  # rounding errors can leave nothing
    return int(draw_tokens(p.unsqueeze(0), generators.draw_uniform())), False
