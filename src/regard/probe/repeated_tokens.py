"""Repeated random tokens: text without meaning, in which only what stood earlier predicts what follows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.mechanism.arguments import check_count
from regard.models import GPT2

SEEDS = 8  # rows of a probe, each of its own seed
LENGTH = 50  # random tokens, which are then repeated
MOST, MOST_TOKENS = 10_000, 2**31 - 1  # of each of these, and of a vocabulary
REPEATS = 2  # how often the random tokens stand in a row of the probe


@dataclass(frozen=True, eq=False)
class Probe:
    """Random tokens, repeated: tokens (b, t) with a row for each seed, and where the begin token ends and a copy begins.

    Row: the begin token if the model has one, then `length` different random tokens, then the same ones again, `repeats` times
    in all.
    """

    tokens: Tensor
    begin: int  # tokens before the first copy: 1 or 0
    length: int

    @property
    def later_copies(self) -> slice:
        """The positions of the later copies: there every pattern can occur, as each token stood earlier."""
        return slice(self.begin + self.length, self.tokens.shape[1])

    @property
    def repeated(self) -> slice:
        """The positions whose next token a head can predict from an earlier copy: all of the later copies but their last."""
        return slice(self.begin + self.length, self.tokens.shape[1] - 1)


def make_probe(
    vocabulary: int,
    *,
    begin: int | None = None,
    context: int | None = None,
    special: tuple[int, ...] = (),
    seeds: int = SEEDS,
    length: int = LENGTH,
    repeats: int = REPEATS,
) -> Probe:
    """Make repeated random tokens for a vocabulary of this size, without the special tokens, within the context.

    Source: Olsson et al. 2022, who repeat 25 random tokens four times after a begin token; two copies of 50 are as long.
    """
    check_count("seeds", seeds, 2, MOST)
    check_count("length", length, 2, MOST)
    check_count("repeats", repeats, 2, MOST)
    check_count("vocabulary", vocabulary, 1, MOST_TOKENS)
    if begin is not None:
        check_count("begin", begin, 0, vocabulary - 1)
    if context is not None:
        check_count("context", context, 1)
    before = 0 if begin is None else 1
    if context is not None:
        length = min(length, (context - before) // repeats)
    usable = torch.ones(vocabulary, dtype=torch.bool)
    usable[[token for token in (*special, begin) if token is not None and 0 <= token < vocabulary]] = False
    candidates = usable.nonzero().flatten()
    length = min(length, len(candidates))
    if length < 2:
        raise ConfigError(
            f"a probe needs at least 2 different tokens, {repeats} times within the context: the vocabulary has "
            f"{len(candidates)} tokens that are not special, and the context is {context}."
        )
    rows = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        sequence = candidates[torch.randperm(len(candidates), generator=generator)[:length]]
        rows.append(torch.cat([torch.tensor([] if begin is None else [begin], dtype=torch.int64), sequence.repeat(repeats)]))
    return Probe(torch.stack(rows), before, length)


def make_probe_of_model(model: nn.Module, vocabulary: int, **settings: Any) -> Probe:
    """Make the probe of a model: begin token, special tokens and context are read from its config, unless they are given.

    The config is one of transformers, or that of a GPT-2 of this package, whose begin token is the end of text.
    """
    config = getattr(model, "config", None)
    special = {name: list_token_ids(getattr(config, name, None)) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    settings.setdefault("special", tuple(token for tokens in special.values() for token in tokens))
    if (begin := find_begin_token(model)) is not None:
        settings.setdefault("begin", begin)
    if (context := find_context(model)) is not None:
        settings.setdefault("context", context)
    return make_probe(vocabulary, **settings)


def find_begin_token(model: nn.Module) -> int | None:
    """Return the token that texts begin with: of a GPT-2 of this package the end of text, else its config's bos_token_id."""
    begin = model.get_end_settings().get("end") if isinstance(model, GPT2) and model.text is not None else None
    known = list_token_ids(getattr(getattr(model, "config", None), "bos_token_id", None))
    return known[0] if begin is None and known else begin


def find_context(model: nn.Module) -> int | None:
    """Return the number of tokens that a model was trained for, from its config; None if it is not there."""
    config = getattr(model, "config", None)
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "context")]
    return next((size for size in found if isinstance(size, int) and size > 0), None)


def list_token_ids(value: Any) -> list[int]:
    """Return the tokens of a config's entry: a number, several, or none."""
    return [token for token in (value if isinstance(value, list | tuple) else [value]) if isinstance(token, int)]
