"""Reader: a model that reads sequences a few tokens at a time, and gives the logits of what may come next in each."""

import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, DataError, ShapeError
from regard.generate.kv_cache import Cache
from regard.mechanism.arguments import check_sequence, describe_value

PREFIX = 16  # tokens that are read alone, to find whether a model sees ahead
LOOKAHEAD = 0.02  # relative difference of logits, above the roundings of half precision
TokenLists = list[list[int]]  # a list of tokens for each sequence; their lengths differ


class ModelSizes(Protocol):
    """The sizes of a model."""

    @property
    def layers(self) -> int:
        """The number of layers that store keys and values."""

    @property
    def context(self) -> int:
        """The most tokens that the model reads."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary."""


class Model(Protocol):
    """Any model that gives logits: GPT2, a quantized one, or one's own.

    If its class has a method `reading`, the result of that is called instead: the same function, made for few tokens.
    """

    @property
    def config(self) -> ModelSizes:
        """The sizes of the model."""

    def __call__(self, tokens: Tensor, cache: Any = None) -> Tensor:
        """Return the logits (b, t, n) of the next token after each of (b, t), or after those that cache.wanted selects."""


def compute_logits(model: Callable[[Tensor], Any], tokens: Tensor) -> Tensor:
    """Return the logits (b, t, n) of tokens (b, t), of any model or function, with their graph.

    Raises ShapeError if it returns none, as a tensor, as .logits, or first in a tuple.
    """
    output = model(tokens)
    first = output[0] if isinstance(output, tuple) and output and isinstance(output[0], Tensor) else output
    logits = getattr(output, "logits", first)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        came = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ShapeError(
            f"of tokens {tuple(tokens.shape)} a model must give logits (b, t, n), or have them as .logits; got {came}. Load a "
            "model of transformers with its head, e.g. by AutoModelForCausalLM."
        )
    return logits


@torch.no_grad()
def sees_ahead(model: Callable[[Tensor], Any], tokens: Tensor, logits: Tensor) -> bool:
    """Return whether the logits (b, t, n) of tokens (b, t) change with later tokens, by the first tokens of a row read alone.

    They do if more than half of them differ by more than LOOKAHEAD of their deviation: rounding changes routes at few places.
    """
    count = min(PREFIX, tokens.shape[1] // 2)
    if count < 1:
        return False
    alone, whole = compute_logits(model, tokens[:1, :count])[0].float(), logits[0, :count].float()
    sizes = (whole - whole.mean(-1, keepdim=True)).norm(dim=-1)
    return bool(((alone - whole).norm(dim=-1) > LOOKAHEAD * sizes).float().mean() > 0.5)


@dataclass(frozen=True, eq=False)
class PrefixCache:
    """A common beginning of many sequences, read once: `generate(rows, n, after=prefix)` continues it with each row."""

    tokens: tuple[int, ...]
    cache: Cache

    @classmethod
    def read(cls, model: Model, tokens: Tensor | Sequence[int]) -> "PrefixCache":
        """Read the tokens (t,) of one sequence."""
        rows = list_token_rows(tokens, model.config.vocabulary)
        if len(rows) != 1:
            raise ShapeError(
                f"a PrefixCache holds the tokens of one sequence (t,), got {len(rows)} sequences: read each alone."
            )
        check_context(model, len(rows[0]), 0)
        reader = SequenceReader(model, len(rows[0]))
        reader.read(rows)
        return cls(tuple(rows[0]), reader.cache)

    def check_layers(self, model: Model) -> None:
        """Raise ShapeError if a model has more or fewer layers than the one that read the tokens."""
        layers = len(self.cache.keys_and_values)
        if layers != model.config.layers:
            raise ShapeError(
                f"the PrefixCache was read by a model with layers={layers}, this model has layers={model.config.layers}. Read "
                "it with this model: PrefixCache.read(model, tokens)."
            )


class SequenceReader:
    """A model and the tokens of each sequence it has read, at most `room` of them with keys and values in a cache.

    Beyond the model's context the window slides: for every new token, the last tokens of each sequence, as many as the context
    holds, are read again as if they were the whole text. Call `check_context` first to raise an error instead.
    """

    def __init__(self, model: Model, room: int, after: PrefixCache | None = None, count: int = 1) -> None:
        reading = getattr(type(model), "reading", None)
        self.model: Model = model if reading is None else reading(model)
        self.capacity = min(room, model.config.context)
        self.device = find_device(model)
        self.rows: TokenLists = [[] for _ in range(count)]
        self.cache = Cache(model.config.layers, self.capacity)
        if after is not None:
            after.check_layers(model)
        if after is not None and len(after.tokens) > 1:
            # the last token is read again with each row, so that a row may be empty
            self.rows = [list(after.tokens[:-1]) for _ in range(count)]
            self.cache = after.cache.fork(count, self.capacity)
            self.cache.crop(len(after.tokens) - 1)

    @torch.no_grad()
    def read(self, new: Sequence[Sequence[int]], last: int = 1) -> Tensor:
        """Read more tokens of each sequence; return the logits after the last of each, (b, n), or the `last`, (b, last, n)."""
        for row, tokens_of_row in zip(self.rows, new, strict=True):
            row.extend(tokens_of_row)
        if max(map(len, self.rows)) > self.capacity:
            self.cache.crop(0)
            new = [row[-self.capacity :] for row in self.rows]
        lengths = [len(row) for row in new]
        t, even = max(lengths), len(set(lengths)) == 1
        tokens = torch.tensor([[*row, *[0] * (t - len(row))] for row in new], device=self.device)  # (b, t)
        if even:
            self.cache.wanted = last
            logits = self.model(tokens, self.cache)
        else:  # the next token of a row goes where its own tokens end
            before, ends = self.cache.lengths, torch.tensor(lengths, device=self.device)
            self.cache.wanted = ends - 1
            logits = self.model(tokens, self.cache)
            self.cache.crop(before + ends)
        return logits[:, -1] if last == 1 else logits

    def crop(self, length: int) -> None:
        """Drop all but the first `length` tokens of every sequence."""
        self.rows = [row[:length] for row in self.rows]
        self.cache.crop(min(length, self.cache.longest))

    def reorder(self, parents: Tensor) -> None:
        """Replace the sequences by copies of others, by index."""
        index = parents.tolist()
        if index == list(range(len(self.rows))):
            return
        if len(index) == len(self.rows):
            self.cache.reorder(parents)
        else:
            self.cache = self.cache.fork(parents)
        self.rows = [list(self.rows[n]) for n in index]


def list_token_rows(tokens: Tensor | Sequence[Any], vocabulary: int, empty: bool = False) -> TokenLists:
    """Return tokens (t,), (b, t) or a list of lists of unequal length as a list for each sequence."""
    if isinstance(tokens, Tensor):
        if tokens.dim() not in (1, 2) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ShapeError(f"tokens are whole numbers (t,) or (b, t), got {tokens.dtype} {tuple(tokens.shape)}.")
        tokens = tokens.to_dense().tolist()
    check_sequence("tokens", tokens)
    nested = len(tokens) > 0 and all(isinstance(one, Sequence) or (isinstance(one, Tensor) and one.dim()) for one in tokens)
    rows = [one.tolist() if isinstance(one, Tensor) else list(one) for one in (tokens if nested else [tokens])]
    if not all(rows) and not empty:
        raise ShapeError("a sequence has no tokens; it needs at least one, for example the end of text.")
    return [[parse_token(token, vocabulary) for token in row] for row in rows]


def parse_token(token: Any, vocabulary: int) -> int:
    """Return a whole number of any library as a token of a vocabulary; raise DataError if it is none."""
    found = token if type(token) is int else None
    if found is None and not isinstance(token, bool) and getattr(token, "dtype", None) is not torch.bool:
        with suppress(TypeError, RuntimeError):  # tensors and arrays that are not one number
            found = operator.index(token)
    if found is None or not 0 <= found < vocabulary:
        raise DataError(f"{describe_value(token)} is not a token of this model: they are numbered from 0 to {vocabulary - 1}.")
    return found


def check_context(model: Model, longest: int, new_tokens: int) -> None:
    """Raise ConfigError if a prompt and what follows exceed the model's context; the last new token is not read."""
    context = model.config.context
    total = longest + max(new_tokens - 1, 0)
    if total > context:
        more_text = f", and {describe_value(new_tokens)} more are requested" if new_tokens else ""
        fits = f"Ask for at most {context - longest + 1}, or" if new_tokens and longest <= context else "Shorten it, or"
        raise ConfigError(
            f"the prompt has {longest} tokens{more_text}; the model reads at most {context}. {fits} set "
            "past to slide, to continue from the last of them."
        )


def find_device(model: Model) -> torch.device:
    """Return the device of a model's parameters and buffers, or the CPU if it has none."""
    tensors = itertools.chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else iter(())
    return next((x.device for x in tensors), torch.device("cpu"))
