"""Perplexity: the number of equally likely tokens, words or bytes that a model is choosing between, on average."""

import codecs
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from regard.errors import ConfigError, DataError
from regard.evaluate.token_losses import Model, check_callable, evaluation_mode, losses, refuse_lookahead
from regard.generate.sequence_reader import compute_logits
from regard.mechanism.arguments import check_count, describe_value
from regard.text.byte_pair import END
from regard.text.corpus import Corpus

TOKEN_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)  # dtypes that tokens may have
DECODE_BLOCK = 1 << 16  # tokens decoded at a time


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The loss of a text and the number of its tokens, words and bytes; values by word or byte are None if not counted."""

    nats: float  # -log of the text's probability: the sum over the tokens that were scored
    tokens: int  # that were scored: all but the first, which nothing precedes
    context: int  # the most tokens that one was predicted from
    stride: int  # tokens from one window to the next
    words: int | None = None
    bytes: int | None = None

    @property
    def loss_nats(self) -> float:
        """The mean loss of a token."""
        return self.nats / self.tokens

    @property
    def by_token(self) -> float:
        """exp(nats / tokens)."""
        return exp_or_inf(self.nats / self.tokens)

    @property
    def by_word(self) -> float | None:
        """exp(nats / words)."""
        return exp_or_inf(self.nats / self.words) if self.words else None

    @property
    def by_byte(self) -> float | None:
        """exp(nats / bytes)."""
        return exp_or_inf(self.nats / self.bytes) if self.bytes else None

    @property
    def bits_per_byte(self) -> float | None:
        """nats / (bytes log 2)."""
        return self.nats / (self.bytes * math.log(2)) if self.bytes else None


def perplexity(
    model: Model,
    tokens: Tensor | Sequence[int] | Any,
    *,
    context: int,
    stride: int | None = None,
    batch: int = 1,
    words: int | None = None,
    bytes: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Perplexity:
    """Compute exp(-mean log p(token | those before it)): every token is scored once, but the first, which nothing precedes.

    model returns logits (b, t, n) of tokens (b, t), or an object with .logits. tokens is one row: a tensor (t,), a list, or a
    Corpus. A window has `context` tokens and predicts what follows each; the next one begins `stride` later, and only its
    tokens that were not scored before count. So after the first window all are predicted from at least context - stride + 1
    tokens; with stride = context, the default, each token is read once and the contexts are shortest. words and bytes are how
    many the text has. `batch` windows are read at once. `watch` is called with the number of tokens scored so far.
    Raises ConfigError for a stride that leaves tokens out, and for a model that sees the tokens it is to predict, DataError for
    fewer than two tokens.
    """
    stride = context if stride is None else stride
    check_windows(context, stride, batch)
    check_callable("model", model)
    for name, value in (("words", words), ("bytes", bytes)):
        if value is not None:
            check_count(name, value, 0)
    count = len(check_row(tokens))
    if count < 2:
        raise DataError(f"perplexity needs at least two tokens, to predict the second from the first; got {count}.")
    nats, scored = 0.0, 0
    with evaluation_mode(model) as device:
        for starts, width in iterate_windows(count, context, stride, batch):
            rows = torch.stack([torch.as_tensor(tokens[n : n + width + 1], dtype=torch.int64) for n in starts]).to(device)
            logits = compute_logits(model, rows[:, :-1])
            if not scored:
                refuse_lookahead(model, rows[:, :-1], logits)
            for row, (start, right) in enumerate(zip(starts, rows[:, 1:], strict=True)):
                new = scored - start  # first token of this window that was not scored before
                nats += float(losses(logits[row, new:], right[new:]).sum())
                scored = start + width
            if watch is not None:
                watch(scored)
    return Perplexity(nats=nats, tokens=scored, context=context, stride=stride, words=words, bytes=bytes)


def iterate_windows(count: int, context: int, stride: int, batch: int) -> Iterator[tuple[list[int], int]]:
    """Yield the starts of `batch` windows of one width, and that width: the number of tokens read in each."""
    last = max(count - 1 - context, 0)  # start of a whole window that ends with the text
    full_windows = -(-last // stride)  # whole windows before the last one
    width = min(context, count - 1)
    for first in range(0, full_windows, batch):
        yield [n * stride for n in range(first, min(first + batch, full_windows))], width
    yield [full_windows * stride], count - 1 - full_windows * stride


def check_windows(context: int, stride: int, batch: int) -> None:
    """Raise ConfigError if tokens would be left out or none be scored."""
    for name, value in (("context", context), ("stride", stride), ("batch", batch)):
        check_count(name, value)
    if stride > context:
        raise ConfigError(f"stride must be at most context, or tokens are left out; got stride={stride}, context={context}.")


def check_row(tokens: Any) -> Any:
    """Return one row of tokens as it is, or raise DataError."""
    if isinstance(tokens, Tensor):
        is_row = tokens.dim() == 1 and tokens.dtype in TOKEN_DTYPES and tokens.layout is torch.strided
    elif isinstance(tokens, list | tuple):
        is_row = all(isinstance(token, Integral) for token in tokens)
    else:  # a Corpus, or an array
        kind = getattr(getattr(tokens, "dtype", None), "kind", "i")
        is_row = hasattr(tokens, "__getitem__") and hasattr(tokens, "__len__") and kind in ("i", "u")
        is_row = is_row and not isinstance(tokens, str | bytes | Mapping)
    if not is_row:
        raise DataError(
            f"tokens must be one row of whole numbers: a tensor (t,), a list or a Corpus; got {describe_value(tokens)}."
        )
    return tokens


def exp_or_inf(nats: float) -> float:
    """Compute exp(nats), infinite beyond the range of a float."""
    return math.inf if nats >= 709 else math.exp(nats)  # NaN stays NaN


def count_words_and_bytes(corpus: Corpus) -> tuple[int, int]:
    """Count the words, between white space, and the bytes of a corpus's text.

    The ends of documents are no text, and end words.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    end = corpus.text.bytes([corpus.text.special[END]]) if END in corpus.text.special else None
    words, count, inside = 0, 0, False  # inside: whether the text so far ends within a word
    for start in range(0, corpus.tokens, DECODE_BLOCK):
        ids = corpus[start : start + DECODE_BLOCK]
        ends = int((ids == corpus.text.special[END]).sum()) if end else 0
        data = corpus.text.bytes(ids.tolist())
        count += len(data) - ends * len(end or b"")
        text = decoder.decode(data.replace(end, b"\n") if end else data)
        words += len(text.split()) - (inside and text[:1].strip() != "")
        inside = text[-1:].strip() != "" if text else inside
    return words, count
