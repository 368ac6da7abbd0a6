"""Convolution: the banded token-to-token matrix of a short causal convolution of each channel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.map import factors
from regard.mechanism.arguments import check_count, describe_value
from regard.mechanism.spans import Span


@dataclass(frozen=True, eq=False, kw_only=True)
class Convolution:
    """M_ij = kernel[w - 1 - (i - j)] for 0 ≤ i - j < w, else 0: each channel is a head.

    kernel is (1, h, w). The output also has `bias` (1, h), if there is one, which no token causes. batch and length are b, t.
    """

    kernel: Tensor
    batch: int
    length: int
    bias: Tensor | None = None
    PARAMETERS: ClassVar[tuple[str, ...]] = ("kernel", "bias")  # tensors that do not depend on the token

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Tensor) or self.kernel.dim() != 3 or len(self.kernel) != 1:
            raise ShapeError(f"kernel must be (1, h, w), got {describe_value(self.kernel)}.")
        check_count("batch", self.batch, least=0)
        check_count("length", self.length, least=0)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        return {"kernel": self.kernel} | ({} if self.bias is None else {"bias": self.bias})

    @property
    def shape(self) -> tuple[int, int, int]:
        """The batch rows, heads and tokens (b, h, t)."""
        return self.batch, self.kernel.shape[1], self.length

    @property
    def rows(self) -> int:
        """The number of queries: each token is one."""
        return self.length

    def select_rows(self, rows: Tensor) -> "Convolution":
        """Return the convolution of some batch rows, by index."""
        return replace(self, batch=len(rows))

    @classmethod
    def join_tokens(cls, parts: "Sequence[Convolution]") -> "Convolution":
        """Return the convolution of consecutive calls, each of which sees the last tokens of the one before."""
        joined = factors.join_tokens([part.tensors for part in parts], [part.length for part in parts], cls.PARAMETERS)
        return cls(**joined, batch=max(part.batch for part in parts), length=sum(part.length for part in parts))

    @classmethod
    def join_heads(cls, parts: "Sequence[Convolution]") -> "Convolution":
        """Return the convolution whose channels are those of several, one after the other."""
        return cls(**factors.join_heads([part.tensors for part in parts]), batch=parts[0].batch, length=parts[0].length)

    def can_reach(self, back: Tensor) -> Tensor:
        """Return whether a query reaches the token so many places before it."""
        return (back >= 0) & (back < self.kernel.shape[2])

    def build_plane(self, b: int, h: int) -> "ConvolutionPlane":
        """Return the matrix of one batch row and head."""
        return ConvolutionPlane(self, h)


@dataclass(frozen=True, eq=False)
class ConvolutionPlane:
    """The matrix (t, t) of one head, in float64."""

    convolution: Convolution
    h: int

    @cached_property
    def kernel(self) -> Tensor:
        """The weights by distance, (w,): first that of the token itself."""
        return self.convolution.kernel[0, self.h].double().flip(0)

    def find_keys(self, first: int, last: int) -> Span:
        """Return the span of the keys that the queries first to last may see, both included."""
        return max(0, first - len(self.kernel) + 1), last + 1

    def compute_rows(self, queries: Tensor, first: int, stop: int) -> Tensor:
        """Compute the entries (n, m) of queries (n,) by index on the keys first to stop."""
        back = queries.unsqueeze(-1) - torch.arange(first, stop, device=queries.device)
        is_near = (back >= 0) & (back < len(self.kernel))
        return self.kernel[back.clamp(0, len(self.kernel) - 1)].where(is_near, 0)
