"""The tensors that define an implicit map, each O(T): how those of several calls, or of several groups of heads, are joined."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regard.errors import ConfigError

Factors = Mapping[str, Tensor]


def join_tokens(parts: Sequence[Factors], lengths: Sequence[int], parameters: Sequence[str]) -> dict[str, Tensor]:
    """Return factors of consecutive calls, joined along the tokens, the third axis.

    lengths are the tokens of each call. A tensor whose third axis is 1 stays so if it is the same in all calls. Raises
    ConfigError if the calls have different factors, or different values of `parameters`, which do not depend on the token.
    """
    if any(set(part) != set(parts[0]) for part in parts):
        raise ConfigError(
            "the calls of one layer have different factors, so they do not form one map: recording[name] has each of them."
        )
    found = {}
    for name, first in parts[0].items():
        tensors = [part[name] for part in parts]
        if name in parameters or (first.shape[2] == 1 and len(parts) > 1):
            if all(torch.equal(first, x) for x in tensors):
                found[name] = first
                continue
            if name in parameters:
                raise ConfigError(
                    f"{name} differs between the calls of one layer, so they do not form one map: recording[name] has "
                    "each of them."
                )
        found[name] = concatenate([expand_axis(x, 2, t) for x, t in zip(tensors, lengths, strict=True)], 2)
    return found


def join_heads(parts: Sequence[Factors]) -> dict[str, Tensor]:
    """Return factors of several calls with the same number of heads, joined along the heads, the second axis.

    Raises ConfigError if the calls have different factors or tokens.
    """
    if any(set(part) != set(parts[0]) for part in parts):
        raise ConfigError("the calls of one layer have different factors: recording[name] has each of them.")
    return {name: concatenate([part[name] for part in parts], 1) for name in parts[0]}


def concatenate(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate tensors along an axis, with an axis of batch rows of 1 expanded to that of the others."""
    if len(tensors) == 1:
        return tensors[0]
    batch = max(len(x) for x in tensors)
    return torch.cat([expand_axis(x, 0, batch) for x in tensors], axis)


def expand_axis(x: Tensor, axis: int, size: int) -> Tensor:
    """Return x with an axis of 1 expanded to a size."""
    shape = [size if n == axis and length == 1 else -1 for n, length in enumerate(x.shape)]
    return x.expand(shape)
