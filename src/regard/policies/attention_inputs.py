"""AttentionInputs: what a policy decides from, the queries, keys and values of one layer and the length of the prompt."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.map import AttentionMap
from regard.mechanism.mask_algebra import Mask
from regard.mechanism.masks import Causal
from regard.mechanism.scores import score_dtype

CAUSAL = Causal()
Integers = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionInputs:
    """The queries (b, h, t, d), keys (b, g, t, d) and values (b, g, t, e) of a layer's tokens, and how they attend.

    The first `prompt` tokens are read at once; the others follow one by one. mask, scale, softcap, bias and sinks are those of
    attend. layer is the number of the layer. Values are None where only keys are known. weight_sums are what `sum_weights`
    returns, where they were computed with something else.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None = None
    prompt: int
    layer: int = 0
    mask: Mask = CAUSAL
    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    weight_sums: Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.k.shape[2]

    @property
    def heads_per_key(self) -> int:
        """The number of query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    def find_key_ranges(self) -> tuple[Integers, Integers]:
        """Return the first key that each query may see and the end of its keys, (t,).

        Raises ConfigError if the mask has no such range for each query.
        """
        ranges = self.mask.find_key_ranges(self.tokens, self.tokens, 0)
        if ranges is None:
            raise ConfigError(
                f"this needs a mask with which each query sees one range of keys, such as Causal() & Window(left=255), not "
                f"{self.mask}."
            )
        first, stop = (np.ascontiguousarray(x[0].numpy()) for x in ranges)
        return first, stop

    def count_queries(self) -> Tensor:
        """Return the number of queries that see each key, (t,)."""
        first, stop = (torch.from_numpy(x).long().bincount(minlength=self.tokens + 1) for x in self.find_key_ranges())
        return (first - stop).cumsum(0)[: self.tokens]

    def select_prompt(self) -> "AttentionInputs":
        """Return the inputs of the prompt alone."""
        t = self.prompt
        bias = self.bias
        if bias is not None:
            bias = bias[..., : t if bias.shape[2] > 1 else 1, : t if bias.shape[3] > 1 else 1]
        v = None if self.v is None else self.v[:, :, :t]
        return replace(self, q=self.q[:, :, :t], k=self.k[:, :, :t], v=v, mask=self.mask.truncate(t, t), bias=bias)

    def build_map(self, first: int = 0) -> AttentionMap:
        """Return the map of the queries from `first` on, (b, h, t - first, t)."""
        bias = self.bias
        if bias is not None and bias.shape[2] > 1:
            bias = bias[:, :, first:]
        return AttentionMap(
            self.q[:, :, first:],
            self.k,
            self.mask,
            scale=self.scale,
            softcap=self.softcap,
            bias=bias,
            sinks=self.sinks,
            offset=first,
        )

    def sum_weights(self) -> Tensor:
        """Return the sum of the weights of the prompt's queries on each of its keys, (b, h, prompt)."""
        return self.select_prompt().build_map().received() if self.weight_sums is None else self.weight_sums

    def average_group(self, x: Tensor) -> Tensor:
        """Average numbers of query heads (b, h, ...) over the heads that share a key head, (b, g, ...)."""
        return x.view(x.shape[0], self.k.shape[1], self.heads_per_key, *x.shape[2:]).mean(2)

    def require_values(self, name: str) -> Tensor:
        """Return the values in float32 or better. Raises ConfigError if there are none."""
        if self.v is None:
            raise ConfigError(f"{name} reads the values. Record with regard.record(model, keep='values').")
        return self.v.to(score_dtype(self.v.dtype))
