"""ScoredMatrix: weights of queries and keys that are no softmax: activations of scores, mixed and subtracted softmaxes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map.plane import multiply_exactly
from regard.mechanism import softmax
from regard.mechanism.arguments import check_choice, describe_value
from regard.mechanism.mask_algebra import EVERYTHING, Mask, Offset
from regard.mechanism.masks import Given
from regard.mechanism.spans import Span

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of scores, entry by entry
    "relu": F.relu,
    "squared relu": lambda scores: F.relu(scores).square(),
    "sigmoid": torch.sigmoid,
    "square": torch.square,
    "silu": F.silu,
    "gelu": F.gelu,
    "identity": lambda scores: scores,
}
SOFTMAX, IDENTITY = "softmax", "identity"


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredMatrix:
    """M_h = Σ_n mixing_hn A_n + constant_h, times row_scale, where A_n is an activation or the softmax of masked scores.

    The scores are softcap(q_n · k_n scale) + bias + shift, with q (b, n, q, d), k (b, g, k, d), g a divisor of n, and a bias
    that broadcasts to (b, n, q, k); keys that the mask hides have weight 0 in A. mixing is (b or 1, h, n), or None if M is A;
    constant (b or 1, h) and row_scale (b or 1, h or 1, q or 1) are optional. title names the kind of attention.
    """

    q: Tensor
    k: Tensor
    activation: str = SOFTMAX
    mask: Mask = EVERYTHING
    offset: Offset = 0
    scale: float = 1.0
    softcap: float | None = None
    bias: Tensor | None = None
    shift: float = 0.0
    mixing: Tensor | None = None
    constant: Tensor | None = None
    row_scale: Tensor | None = None
    title: str = ""

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, (SOFTMAX, *ACTIVATIONS))
        for name, x in self.tensors.items():
            axes = {"mixing": 3, "row_scale": 3, "constant": 2}.get(name, 4)
            if not x.is_floating_point() or x.dim() != axes:
                raise ShapeError(f"{name} must be a floating point tensor of {axes} axes, got {describe_value(x)}.")
        (b, n, queries, d), (other, g, keys, width) = self.q.shape, self.k.shape
        if b != other or d != width or not g or n % g:
            raise ShapeError(f"k must be ({b}, a divisor of {n}, k, {d}), got {describe_value(self.k)}.")
        h = n if self.mixing is None else self.mixing.shape[1]
        allowed = {
            "bias": ((1, b), (1, n), (1, queries), (keys,)),
            "mixing": ((1, b), (h,), (n,)),
            "constant": ((1, b), (h,)),
            "row_scale": ((1, b), (1, h), (1, queries)),
        }
        for name, sizes in allowed.items():
            x = getattr(self, name)
            if x is not None and any(size not in allowed_sizes for size, allowed_sizes in zip(x.shape, sizes, strict=True)):
                raise ShapeError(f"{name} does not fit queries {tuple(self.q.shape)} and {h} heads, got {describe_value(x)}.")
        if self.softcap is not None and not self.softcap > 0:
            raise ConfigError(f"softcap must be above 0, got {self.softcap}.")
        self.mask.check(queries, keys, self.offset)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        names = ("q", "k", "bias", "mixing", "constant", "row_scale")
        given = {name: getattr(self, name) for name in names}
        return {name: x for name, x in given.items() if x is not None}

    @property
    def shape(self) -> tuple[int, int, int]:
        """The batch rows, heads and keys (b, h, t)."""
        return len(self.q), self.q.shape[1] if self.mixing is None else self.mixing.shape[1], self.k.shape[2]

    @property
    def rows(self) -> int:
        """The number of queries."""
        return self.q.shape[2]

    def select_rows(self, rows: Tensor) -> "ScoredMatrix":
        """Return the matrix of some batch rows, by index."""
        rows = rows.to(self.q.device)
        chosen: dict[str, Any] = {name: x[rows] if name in ("q", "k") or len(x) > 1 else x for name, x in self.tensors.items()}
        queries, keys = (torch.arange(n, device=rows.device) for n in (self.rows, self.shape[2]))
        table = self.mask.block(queries, keys, self.offset)
        if len(table) == 1:
            return replace(self, **chosen)
        return replace(self, **chosen, mask=Given.from_shared_table(table[rows]), offset=0)

    def build_plane(self, b: int, h: int) -> "ScoredPlane":
        """Return the matrix of one batch row and head."""
        return ScoredPlane(self, b, h)


@dataclass(frozen=True, eq=False)
class ScoredPlane:
    """The matrix (q, k) of one batch row and head, in float64. A plane lives for one computation."""

    matrix: ScoredMatrix
    b: int
    h: int

    @cached_property
    def factors(self) -> list[tuple[int, float]]:
        """The heads of scores that this head is made of, each with its factor."""
        if self.matrix.mixing is None:
            return [(self.h, 1.0)]
        return [(n, w) for n, w in enumerate(self.select_own(self.matrix.mixing)[self.h].tolist()) if w]

    def select_own(self, x: Tensor) -> Tensor:
        """Return the part of a tensor that belongs to this batch row, in float64."""
        return x[self.b if len(x) > 1 else 0].double()

    def find_keys(self, first: int, last: int) -> Span:
        """Return the span of the keys that the queries first to last may see, both included."""
        return 0, self.matrix.shape[2]

    def compute_rows(self, queries: Tensor, first: int, stop: int) -> Tensor:
        """Compute the entries (n, m) of queries (n,) by index on the keys first to stop."""
        matrix = self.matrix
        rows = torch.zeros(len(queries), matrix.shape[2], dtype=torch.float64, device=matrix.q.device)
        for n, factor in self.factors:
            rows += factor * self.compute_activated_rows(n, queries)
        if matrix.constant is not None:
            rows += self.select_own(matrix.constant)[self.h]
        if matrix.row_scale is not None:
            own = self.select_own(matrix.row_scale)
            own = own[self.h if len(own) > 1 else 0]
            rows *= (own[queries] if len(own) > 1 else own).unsqueeze(-1)
        return rows[:, first:stop]

    def compute_activated_rows(self, n: int, queries: Tensor) -> Tensor:
        """Compute complete rows (n, k) of the activation of one head of scores."""
        matrix = self.matrix
        share = matrix.q.shape[1] // matrix.k.shape[1]
        q, k = matrix.q[self.b, n, queries].double(), matrix.k[self.b, n // share].double()
        bias = None
        if matrix.bias is not None:
            own = self.select_own(matrix.bias)
            own = own[n if len(own) > 1 else 0]
            bias = own[queries] if len(own) > 1 else own
        table = matrix.mask.block(queries, torch.arange(len(k), device=k.device), matrix.offset)
        seen = table[self.b if len(table) > 1 else 0]
        return activate_scores(multiply_exactly(q, k.T), matrix, bias, seen[n if len(seen) > 1 else 0])


def activate_scores(raw: Tensor, matrix: ScoredMatrix, bias: Tensor | None, seen: Tensor) -> Tensor:
    """Return the activation of products (..., q, k) of queries and keys by the settings of a matrix; `seen` is its mask."""
    scores = raw * matrix.scale
    scores = scores if matrix.softcap is None else matrix.softcap * (scores / matrix.softcap).tanh()
    scores = scores if bias is None else scores + bias
    scores = scores + matrix.shift if matrix.shift else scores
    if matrix.activation == SOFTMAX:
        return softmax.stable(scores.masked_fill(~seen, -torch.inf))
    return ACTIVATIONS[matrix.activation](scores).masked_fill(~seen, 0)
