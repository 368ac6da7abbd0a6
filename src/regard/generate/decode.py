"""Decoding: the continuation of a prompt, a token at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.generate import beams, speculate
from regard.generate.pieces import Pieces
from regard.generate.reader import Model, Reader, Rows, refuse_beyond, rows_of
from regard.generate.sampling import Dice, checked, wide
from regard.generate.settings import Settings, Text
from regard.mechanism.arguments import check_instance, describe


@dataclass(frozen=True, eq=False)
class Chosen:
    """One token for each sequence, (b,), and the model's logits (b, n) it was chosen from, before any setting is applied."""

    tokens: Tensor
    logits: Tensor
    over: Tensor  # (b,): whether the sequence had ended before, so that the token is padding

    @property
    def log_probabilities(self) -> Tensor:
        """The model's own log-probability of each token, (b,), in nats; 0 for a sequence that has ended."""
        found = wide(self.logits).log_softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)
        return found.masked_fill(self.over, 0)

    def top(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the n likeliest tokens and their log-probabilities, both (b, n), the likeliest first."""
        values, tokens = wide(self.logits).log_softmax(-1).topk(min(n, self.logits.shape[-1]))
        return tokens, values


def generate(model: Model, tokens: Tensor | Sequence[Any], max_new_tokens: int, **settings: Any) -> Iterator[Tensor]:
    """Generate the next tokens, (b,) at a time, for prompts (t,), (b, t) or a list of lists of unequal length.

    settings are the fields of Settings. A sequence that has ended yields the end-of-text token from then on; generation stops
    once all have ended. The result for a prompt does not depend on the others of its batch. Raises ConfigError at once, before
    anything is computed, if prompt and new tokens exceed the context, unless past="slide".
    """
    asked = Settings(**settings)
    if asked.beams > 1:
        return beamed(*prepared(model, tokens, max_new_tokens, asked), max_new_tokens, asked)
    return (chosen.tokens for chosen in choices(model, tokens, max_new_tokens, **settings))


def choices(model: Model, tokens: Tensor | Sequence[Any], max_new_tokens: int, **settings: Any) -> Iterator[Chosen]:
    """Generate the next tokens as `generate` does, each with the logits it was chosen from.

    The logits give the token's log-probability and the likeliest others. Raises ConfigError for a beam search.
    """
    asked = Settings(**settings)
    if asked.beams > 1:
        raise ConfigError("a beam search chooses sequences, not tokens: leave out beams, or use generate.")
    reader, rows = prepared(model, tokens, max_new_tokens, asked)
    dice = Dice(asked.seed, len(rows))
    if asked.draft is None:
        return plain(reader, rows, max_new_tokens, asked, dice)
    if len(rows) > 1:
        raise ConfigError(f"a draft guesses for one sequence at a time, got {len(rows)}.")
    guesser = speculate.guesser(asked.draft, model, reader.room, asked, dice)
    return speculated(reader, rows, max_new_tokens, asked, dice, guesser)


def complete(model: Model, prompt: str, max_new_tokens: int, **settings: Any) -> Iterator[str]:
    """Generate the text that follows a prompt, a piece at a time: whole characters, up to the end of text or a stop string.

    The stop string is not included. An empty prompt starts from the end-of-text token, as texts did in training. The setting
    `text` is the tokenizer.
    """
    asked = Settings(**settings)
    ids, text = encoded(check_instance("the prompt", prompt, str), asked)
    return pieces(generate(model, [ids], max_new_tokens, **settings), text, asked)


def encoded(prompt: str, asked: Settings) -> tuple[list[int], Text]:
    """Return the tokens of a prompt and the tokenizer; raise DataError if there is none, or nothing to begin with."""
    if asked.text is None:
        raise DataError("this model has no vocabulary: set model.text to a regard.text.BytePair first.")
    ids = asked.text.encode(prompt)
    if not ids and asked.after is None:
        if asked.end is None:
            raise DataError("the prompt is empty, and there is no end-of-text token to begin with.")
        ids = [asked.end]
    return ids, asked.text


def pieces(tokens: Iterator[Tensor], text: Text, asked: Settings) -> Iterator[str]:
    """Yield the text of tokens (1,), a piece at a time."""
    found = Pieces(asked.strings)
    for token in map(int, tokens):
        if token in asked.ends:
            break
        piece = found.add(text.bytes([token]))
        if piece:
            yield piece
        if found.over:
            return
    rest = found.add(b"", last=True)
    if rest:
        yield rest


def prepared(model: Model, tokens: Tensor | Sequence[Any], most: int, asked: Settings) -> tuple[Reader, Rows]:
    """Return a reader, and the first tokens it is to read for each sequence."""
    if not isinstance(most, int) or most < 0:
        raise ConfigError(f"max_new_tokens must be a whole number of at least 0, got {describe(most)}.")
    after = asked.after
    rows = rows_of(tokens, model.config.vocabulary, empty=after is not None)
    before = 0 if after is None else len(after.tokens)
    longest = before + max(map(len, rows))
    if asked.past == "refuse":
        refuse_beyond(model, longest, most)
    reader = Reader(model, longest + max(most - 1, 0), after, len(rows))
    return reader, rows if after is None else [[after.tokens[-1], *row] for row in rows]


def plain(reader: Reader, rows: Rows, most: int, asked: Settings, dice: Dice) -> Iterator[Chosen]:
    """Yield a token for every sequence, one step after the other."""
    new = rows
    found: Rows = [[] for _ in rows]
    over = [False] * len(rows)
    for _ in range(most):
        logits = reader.read(new)
        tokens = asked.choose(logits, reader.rows, dice)
        for row, token, ended in zip(found, tokens.tolist(), over, strict=True):
            row.append(asked.padding(row) if ended else token)
        new = [row[-1:] for row in found]
        last = torch.tensor([row[-1] for row in found], device=reader.device)
        yield Chosen(last, logits, torch.tensor(over, device=reader.device))
        over = [ended or asked.ended(row) for row, ended in zip(found, over, strict=True)]
        if all(over):
            return


def speculated(
    reader: Reader, rows: Rows, most: int, asked: Settings, dice: Dice, guesser: speculate.Guesser
) -> Iterator[Chosen]:
    """Yield the tokens of one sequence by speculative decoding."""
    found, over = [], torch.tensor([False], device=reader.device)
    for token, logits in speculate.speculate(reader, rows[0], most, guesser, asked.guesses, asked, dice):
        found.append(token)
        yield Chosen(torch.tensor([token], device=reader.device), logits.unsqueeze(0), over)
        if asked.ended(found):
            return


def beamed(reader: Reader, rows: Rows, most: int, asked: Settings) -> Iterator[Tensor]:
    """Yield the tokens of the best sequences that beam search finds."""
    if not most:
        return

    def scores(logits: Tensor) -> Tensor:
        return asked.penalised(checked(wide(logits)).log_softmax(-1), reader.rows)

    def step(parents: Tensor, tokens: list[int]) -> Tensor:
        reader.reorder(parents)
        return scores(reader.read([[token] for token in tokens]))

    found = beams.search(scores(reader.read(rows)), step, asked.beams, most, asked.ended, asked.length_penalty)
    best = [row[0].tokens for row in found]
    for place in range(max(map(len, best))):
        yield torch.tensor([row[place] if place < len(row) else asked.padding(row) for row in best], device=reader.device)
