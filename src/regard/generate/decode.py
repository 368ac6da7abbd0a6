"""Decoding: the continuation of a prompt, a token at a time."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.generate import beams, speculate
from regard.generate.sampling import RowGenerators, check_logits, widen_logits
from regard.generate.sequence_reader import Model, SequenceReader, TokenLists, check_context, list_token_rows
from regard.generate.settings import Settings, Tokenizer
from regard.mechanism.arguments import check_count, check_instance


class PieceDecoder:
    """An incremental decoder that holds back incomplete characters and whatever may be the beginning of a stop string.

    Of several stop strings the one that is complete first counts, wherever the boundaries of tokens are.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.stops = stops
        self.has_stopped = False  # whether a stop string was found
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, data: bytes, last: bool = False) -> str:
        """Return the text that is certain after more bytes; after the last, all of it, an incomplete character as U+FFFD."""
        if self.has_stopped:
            return ""
        text = self._held + self._decoder.decode(data, last)
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self.stops if stop in text]
        if found:
            self.has_stopped = True
            return text[: min(found)[1]]
        certain = len(text) - (0 if last else count_stop_prefix(text, self.stops))
        self._held = text[certain:]
        return text[:certain]


def count_stop_prefix(text: str, stops: Sequence[str]) -> int:
    """Return how many of the last characters of a text may be the beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


@dataclass(frozen=True, eq=False)
class TokenChoice:
    """One token for each sequence, (b,), and the model's logits (b, n) it was chosen from, before any setting is applied."""

    tokens: Tensor
    logits: Tensor
    has_ended: Tensor  # (b,): whether the sequence had ended before, so that the token is padding

    @property
    def log_probabilities(self) -> Tensor:
        """The model's own log-probability of each token, (b,), in nats; 0 for a sequence that has ended."""
        found = widen_logits(self.logits).log_softmax(-1).gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1)
        return found.masked_fill(self.has_ended, 0)

    def top(self, n: int) -> tuple[Tensor, Tensor]:
        """Return the n likeliest tokens and their log-probabilities, both (b, n), the likeliest first."""
        values, tokens = widen_logits(self.logits).log_softmax(-1).topk(min(n, self.logits.shape[-1]))
        return tokens, values


def generate(model: Model, tokens: Tensor | Sequence[Any], max_new_tokens: int, **settings: Any) -> Iterator[Tensor]:
    """Generate the next tokens, (b,) at a time, for prompts (t,), (b, t) or a list of lists of unequal length.

    settings are the fields of Settings. A sequence that has ended yields the end-of-text token from then on; generation stops
    once all have ended. The result for a prompt does not depend on the others of its batch. Raises ConfigError at once, before
    anything is computed, if prompt and new tokens exceed the context, unless past="slide".
    """
    options = Settings(**settings)
    max_new_tokens = check_count("max_new_tokens", max_new_tokens, 0)
    if options.beams > 1:
        return generate_by_beams(*make_reader(model, tokens, max_new_tokens, options), max_new_tokens, options)
    return (chosen.tokens for chosen in choices(model, tokens, max_new_tokens, **settings))


def choices(model: Model, tokens: Tensor | Sequence[Any], max_new_tokens: int, **settings: Any) -> Iterator[TokenChoice]:
    """Generate the next tokens as `generate` does, each with the logits it was chosen from.

    The logits give the token's log-probability and the likeliest others. Raises ConfigError for a beam search.
    """
    return start_decoding(model, tokens, max_new_tokens, **settings).steps


@dataclass(frozen=True, eq=False)
class Decoding:
    """The tokens that `choices` generates, and the reader whose cache holds the keys and values of those that were read."""

    reader: SequenceReader
    steps: Iterator[TokenChoice]


def start_decoding(model: Model, tokens: Tensor | Sequence[Any], max_new_tokens: int, **settings: Any) -> Decoding:
    """Start to generate as `choices` does; nothing is read before the first step."""
    options = Settings(**settings)
    max_new_tokens = check_count("max_new_tokens", max_new_tokens, 0)
    if options.beams > 1:
        raise ConfigError("a beam search chooses sequences, not tokens: leave out beams, or use generate.")
    reader, rows = make_reader(model, tokens, max_new_tokens, options)
    generators = RowGenerators(options.seed, len(rows))
    if options.draft is None:
        return Decoding(reader, choose_tokens(reader, rows, max_new_tokens, options, generators))
    if len(rows) > 1:
        raise ConfigError(f"a draft guesses for one sequence at a time, got {len(rows)}.")
    guesser = speculate.make_guesser(options.draft, model, reader.capacity, options, generators)
    return Decoding(reader, choose_speculatively(reader, rows, max_new_tokens, options, generators, guesser))


def complete(model: Model, prompt: str, max_new_tokens: int, **settings: Any) -> Iterator[str]:
    """Generate the text that follows a prompt, a piece at a time: whole characters, up to the end of text or a stop string.

    The stop string is not included. An empty prompt starts from the end-of-text token, as texts did in training. The setting
    `text` is the tokenizer.
    """
    options = Settings(**settings)
    ids, text = encode_prompt(check_instance("the prompt", prompt, str), options)
    return decode_pieces(generate(model, [ids], max_new_tokens, **settings), text, options)


def encode_prompt(prompt: str, options: Settings) -> tuple[list[int], Tokenizer]:
    """Return the tokens of a prompt and the tokenizer; raise DataError if there is none, or nothing to begin with."""
    if options.text is None:
        raise DataError("this model has no vocabulary: set model.text to a regard.text.BytePair first.")
    ids = options.text.encode(prompt)
    if not ids and options.after is None:
        if options.end is None:
            raise DataError("the prompt is empty, and there is no end-of-text token to begin with.")
        ids = [options.end]
    return ids, options.text


def decode_pieces(tokens: Iterator[Tensor], text: Tokenizer, options: Settings) -> Iterator[str]:
    """Yield the text of tokens (1,), a piece at a time."""
    found = PieceDecoder(options.stop_strings)
    for token in map(int, tokens):
        if token in options.end_tokens:
            break
        piece = found.add(text.bytes([token]))
        if piece:
            yield piece
        if found.has_stopped:
            return
    rest = found.add(b"", last=True)
    if rest:
        yield rest


def make_reader(
    model: Model, tokens: Tensor | Sequence[Any], most: int, options: Settings
) -> tuple[SequenceReader, TokenLists]:
    """Return a reader, and the first tokens it is to read for each sequence."""
    options.check_end_tokens(model.config.vocabulary)
    after = options.after
    rows = list_token_rows(tokens, model.config.vocabulary, empty=after is not None)
    before = 0 if after is None else len(after.tokens)
    longest = before + max(map(len, rows))
    if options.past == "refuse":
        check_context(model, longest, most)
    reader = SequenceReader(model, longest + max(most - 1, 0), after, len(rows))
    return reader, rows if after is None else [[after.tokens[-1], *row] for row in rows]


def choose_tokens(
    reader: SequenceReader, rows: TokenLists, most: int, options: Settings, generators: RowGenerators
) -> Iterator[TokenChoice]:
    """Yield a token for every sequence, one step after the other."""
    new = rows
    found: TokenLists = [[] for _ in rows]
    over = [False] * len(rows)
    for _ in range(most):
        logits = reader.read(new)
        tokens = options.choose(logits, reader.rows, generators)
        for row, token, ended in zip(found, tokens.tolist(), over, strict=True):
            row.append(options.padding_token(row) if ended else token)
        new = [row[-1:] for row in found]
        last = torch.tensor([row[-1] for row in found], device=reader.device)
        yield TokenChoice(last, logits, torch.tensor(over, device=reader.device))
        over = [ended or options.has_ended(row) for row, ended in zip(found, over, strict=True)]
        if all(over):
            return


def choose_speculatively(
    reader: SequenceReader,
    rows: TokenLists,
    most: int,
    options: Settings,
    generators: RowGenerators,
    guesser: speculate.Guesser,
) -> Iterator[TokenChoice]:
    """Yield the tokens of one sequence by speculative decoding."""
    found, over = [], torch.tensor([False], device=reader.device)
    for token, logits in speculate.speculate_tokens(reader, rows[0], most, guesser, options.guesses, options, generators):
        found.append(token)
        yield TokenChoice(torch.tensor([token], device=reader.device), logits.unsqueeze(0), over)
        if options.has_ended(found):
            return


def generate_by_beams(reader: SequenceReader, rows: TokenLists, most: int, options: Settings) -> Iterator[Tensor]:
    """Yield the tokens of the best sequences that beam search finds."""
    if not most:
        return

    def score_logits(logits: Tensor) -> Tensor:
        return options.penalize_repetition(check_logits(widen_logits(logits)).log_softmax(-1), reader.rows)

    def step(parents: Tensor, tokens: list[int]) -> Tensor:
        reader.reorder(parents)
        return score_logits(reader.read([[token] for token in tokens]))

    found = beams.search_beams(
        score_logits(reader.read(rows)), step, options.beams, most, options.has_ended, options.length_penalty
    )
    best = [row[0].tokens for row in found]
    for place in range(max(map(len, best))):
        yield torch.tensor(
            [row[place] if place < len(row) else options.padding_token(row) for row in best], device=reader.device
        )
