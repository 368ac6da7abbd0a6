"""LAMBADA: the last word of a passage, predicted from the rest of it.

The passages were chosen so that people guess the word if they read all of the passage, but not from the last sentence alone.
Source: Paperno et al. 2016. OpenAI's file has them as they are in the books, including capitals and quotes.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from regard.errors import ConfigError, DataError, OutOfRangeError
from regard.evaluate.perplexity import exp_or_inf
from regard.evaluate.token_losses import Model, check_callable, evaluation_mode, losses, refuse_lookahead
from regard.generate.sequence_reader import compute_logits
from regard.mechanism.arguments import check_count, check_instance, describe_value

# words that a sentence seldom ends with: English function words; our own list, since the paper's was not published
FUNCTION_WORDS = """
    a an the this that these those each every either neither some any no such same other own both all few most more many much
    i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself we us our ours
    ourselves they them their theirs themselves who whom whose which what
    of in on at by for with about against between into through during before after above below to from up down out off over
    under upon toward towards without within among along across behind beyond near since until
    and but or nor so yet if because as while although though than unless whether when where why how
    am is are was were be been being have has had having do does did doing can could will would shall should may might must
    not never only just very too also then there here now again once even ever still
"""
STOP_WORDS = frozenset(FUNCTION_WORDS.split())


@dataclass(frozen=True, kw_only=True)
class Lambada:
    """How many last words were predicted, and how surprising they were."""

    passages: int
    right: int  # passages whose last word is the likeliest, token by token
    right_filtered: int | None  # `right` if no stop word may begin the last word; None if that was not requested
    nats: float  # -log of all last words' probabilities together
    tokens: int  # of all last words

    @property
    def accuracy(self) -> float:
        """The share of last words that are the likeliest."""
        return self.right / self.passages

    @property
    def accuracy_filtered(self) -> float | None:
        """The share if stop words are excluded, as the paper counts; None if that was not requested."""
        return None if self.right_filtered is None else self.right_filtered / self.passages

    @property
    def by_word(self) -> float:
        """The perplexity of a last word: exp(nats / passages)."""
        return exp_or_inf(self.nats / self.passages)

    @property
    def by_token(self) -> float:
        """The perplexity of a token of a last word: exp(nats / tokens)."""
        return exp_or_inf(self.nats / self.tokens)


@dataclass(frozen=True)
class Passage:
    """The tokens of a passage, and the number of tokens of its last word."""

    tokens: list[int]
    word: int


def lambada(
    model: Model,
    passages: Iterable[str],
    encode: Callable[[str], list[int]],
    *,
    context: int = 1024,
    stop: Collection[int] = (),
    batch: int = 8,
    watch: Callable[[int], None] | None = None,
) -> Lambada:
    """Score the last word of each passage, given everything before it.

    The last word is what follows the last blank, with that blank, in the tokens it has at the end of its passage. It is
    right if each of its tokens is the likeliest after all tokens before it, as in greedy generation. Perplexity is over the
    last words alone.

    The accuracy that the GPT-2 paper reports (45.99 % for the smallest) excludes stop words: the model is assumed not to know
    that a last word is wanted, and the likeliest of the other words is compared (section 3.3; 52.66 % becomes 63.24 % for the
    largest). Here, given the tokens of stop words (`stop_tokens`), none of them may be a last word's first token; later tokens
    are not restricted. A last word that begins with one of them is therefore wrong in this count. Which words OpenAI excluded,
    whether their perplexity is by word or by token, and how it treats words of several tokens was not published: expect
    figures close to theirs, not the same.

    Of a passage longer than the context the end is used. Batches are padded behind the passages, where causal models do not
    attend. Raises DataError for a passage of one word, ConfigError for a model that sees the word.
    """
    check_count("batch", batch)
    check_count("context", context, 2)
    for name, value in (("model", model), ("encode", encode)):
        check_callable(name, value)
    if isinstance(stop, str | bytes | Tensor) or not isinstance(stop, Collection):
        raise ConfigError(f"stop is a list or a set of tokens; got {describe_value(stop)}.")
    stop = [check_count("a stop token", token, 0) for token in stop]
    if isinstance(passages, str | bytes) or not isinstance(passages, Iterable):
        raise DataError(f"passages must be an iterable of texts; got {describe_value(passages)}.")
    count = right = filtered = tokens = 0
    nats = 0.0
    left_passages = split_passages(passages, encode, context)
    with evaluation_mode(model) as device:
        while some := list(islice(left_passages, batch)):
            read = pad_passages(some).to(device)[:, :-1]
            logits = compute_logits(model, read)
            if not count:
                refuse_lookahead(model, read, logits)
            for passage, rows in zip(some, logits, strict=True):
                size = len(passage.tokens)
                predicted = rows[size - 1 - passage.word : size - 1]
                word = torch.tensor(passage.tokens[-passage.word :], device=device)
                nats += float(losses(predicted, word).sum())
                is_right, is_right_filtered = match_greedily(predicted, word, stop)
                right, filtered = right + is_right, filtered + is_right_filtered
                tokens, count = tokens + passage.word, count + 1
            if watch is not None:
                watch(count)
    if not count:
        raise DataError("passages is empty: pass at least one text.")
    return Lambada(passages=count, right=right, right_filtered=filtered if stop else None, nats=nats, tokens=tokens)


def match_greedily(logits: Tensor, word: Tensor, stop: Collection[int]) -> tuple[bool, bool]:
    """Return whether a word's tokens are each the likeliest, and whether they are if its first may not be a stop token."""
    found = logits.argmax(-1) == word
    first = logits[0].clone()
    if stop and max(stop) >= len(first):
        raise OutOfRangeError(f"stop token {max(stop)} is out of range: the model has tokens 0 to {len(first) - 1}.")
    first[list(stop)] = -math.inf
    return bool(found.all()), bool(found[1:].all() and first.argmax() == word[0])


def split_passages(passages: Iterable[str], encode: Callable[[str], list[int]], context: int) -> Iterator[Passage]:
    """Yield each passage as tokens, with the number of tokens of its last word."""
    for number, text in enumerate(passages):
        before, blank, word = check_instance("a passage", text, str).rstrip().rpartition(" ")
        if not before.strip() or not word:
            raise DataError(f"passage {number} has no last word after others: {text[:60]!r}.")
        tokens, rest = encode(before + blank + word), encode(before)
        size = len(tokens) - len(rest)
        if not 0 < size < context:
            raise DataError(f"passage {number}: its last word {word!r} has {size} tokens, and the context is {context}.")
        last_tokens = tokens[-context:]
        yield Passage(last_tokens, min(size, len(last_tokens) - 1))


def pad_passages(passages: Sequence[Passage]) -> Tensor:
    """Return the tokens of passages (b, t), shorter ones padded with zeros at the end."""
    rows = torch.zeros(len(passages), max(len(one.tokens) for one in passages), dtype=torch.int64)
    for row, passage in zip(rows, passages, strict=True):
        row[: len(passage.tokens)] = torch.tensor(passage.tokens)
    return rows


def stop_tokens(pieces: Iterable[str], words: Collection[str] = STOP_WORDS) -> list[int]:
    """List the tokens that are a stop word by themselves, given the text of every token in the order of their numbers."""
    return [number for number, piece in enumerate(pieces) if piece.strip().lower() in words]
