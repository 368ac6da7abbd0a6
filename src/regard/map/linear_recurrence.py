"""LinearRecurrence: the token-to-token matrix of a layer whose state decays and is written to, from factors that are O(T)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import ConfigError, ShapeError
from regard.map import factors
from regard.map.plane import multiply_exactly
from regard.mechanism.arguments import describe_value
from regard.mechanism.spans import Span

CHUNK = 64  # tokens whose state updates are solved together
GONE = -800.0  # a log decay below it is 0 in float64: the state is reset


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearRecurrence:
    """The matrix M with M v = o of ``S_i = exp(a_i) S_{i-1} + k_i u_iᵀ``, ``o_i = q_iᵀ S_i``, with ``u_i = c_i v_i``.

    Without beta, ``M_ij = exp(r_i + l_j) c_j Σ_n q_in k_jn exp(Σ_{s=j+1..i} a_sn)`` for j ≤ i, or j < i if is_strict; then
    skip is added to the diagonal, and row i is multiplied by gate_i. With beta, the state is corrected by the delta rule:
    ``u_i = beta_i (v_i - (exp(a_i) S_{i-1})ᵀ k_i)``. Every tensor is (b or 1, g, t or 1, ...), where g divides the number of
    heads: decay a (b, g, t, 1 or d), log decays, at most 0, each times the `rates` (1, h, 1, 1 or d) if there are any; q and k
    (b, g, t, d), or None for 1; key_scale c, key_logs l, row_logs r, beta, skip and gate (b, g, t), or None. A decay of -inf
    resets the state. With a decay for each of d, row_logs are (b, g, t, 1 or d), and there are no key_logs. With beta, there
    are none of key_logs, row_logs and is_strict.
    """

    decay: Tensor
    rates: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    key_scale: Tensor | None = None
    key_logs: Tensor | None = None
    row_logs: Tensor | None = None
    beta: Tensor | None = None
    skip: Tensor | None = None
    gate: Tensor | None = None
    is_strict: bool = False
    PARAMETERS: ClassVar[tuple[str, ...]] = ("rates",)  # tensors that do not depend on the token

    def __post_init__(self) -> None:
        tensors = self.tensors
        for name, x in tensors.items():
            axes = 4 if name in ("decay", "rates", "q", "k") or (name == "row_logs" and self.has_several_decays) else 3
            if not x.is_floating_point() or x.dim() != axes:
                raise ShapeError(f"{name} must be a floating point tensor of {axes} axes, got {describe_value(x)}.")
        b, h, t = self.shape
        for name, x in tensors.items():
            if len(x) not in (1, b) or not x.shape[1] or h % x.shape[1] or x.shape[2] not in (1, t):
                raise ShapeError(f"{name} must be ({b} or 1, a divisor of {h}, {t} or 1, ...), got {describe_value(x)}.")
        if self.rates is not None and self.rates.shape[2] != 1:
            raise ShapeError(f"rates must be (1, h, 1, 1 or d), got {describe_value(self.rates)}.")
        if self.beta is not None and (self.is_strict or self.key_logs is not None or self.row_logs is not None):
            raise ConfigError("key_logs, row_logs and is_strict need no beta.")
        if self.has_several_decays and self.key_logs is not None:
            raise ConfigError("key_logs need one decay for all of d.")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: x for name, x in given.items() if isinstance(x, Tensor)}

    @property
    def shape(self) -> tuple[int, int, int]:
        """The batch rows, heads and tokens (b, h, t)."""
        b, h, t = (max(x.shape[axis] for x in self.tensors.values()) for axis in range(3))
        return b, h, t

    @property
    def rows(self) -> int:
        """The number of queries: each token is one."""
        return self.shape[2]

    def select_rows(self, rows: Tensor) -> "LinearRecurrence":
        """Return the recurrence of some batch rows, by index."""
        parts = {name: x for name, x in self.tensors.items() if name not in self.PARAMETERS and len(x) > 1}
        chosen: dict[str, Any] = {name: x[rows.to(x.device)] for name, x in parts.items()}
        return replace(self, **chosen)

    @classmethod
    def join_tokens(cls, parts: "Sequence[LinearRecurrence]") -> "LinearRecurrence":
        """Return the recurrence of consecutive calls, each of which starts from the state that the one before left."""
        lengths = [part.shape[2] for part in parts]
        joined = factors.join_tokens([part.tensors for part in parts], lengths, cls.PARAMETERS)
        return cls(**joined, is_strict=parts[0].is_strict)

    @classmethod
    def join_heads(cls, parts: "Sequence[LinearRecurrence]") -> "LinearRecurrence":
        """Return the recurrence whose heads are those of several, one after the other."""
        return cls(**factors.join_heads([part.tensors for part in parts]), is_strict=parts[0].is_strict)

    @property
    def is_chunked(self) -> bool:
        """Whether the rows are computed chunk by chunk: with a delta rule, or with several decays."""
        return self.beta is not None or self.has_several_decays

    @property
    def has_several_decays(self) -> bool:
        """Whether each of d has a decay of its own."""
        return self.decay.shape[3] > 1 or (self.rates is not None and self.rates.shape[3] > 1)

    def can_reach(self, back: Tensor) -> Tensor:
        """Return whether a query reaches the token so many places before it."""
        return back >= int(self.is_strict and self.skip is None)

    def build_plane(self, b: int, h: int) -> "RecurrencePlane":
        """Return the matrix of one batch row and head."""
        return RecurrencePlane(self, b, h)


@dataclass(frozen=True, eq=False)
class RecurrencePlane:
    """The matrix (t, t) of one batch row and head, in float64. A plane lives for one computation."""

    recurrence: LinearRecurrence
    b: int
    h: int

    def get(self, name: str) -> Tensor | None:
        """Return a tensor of the recurrence for this batch row and head, in float64: (t, ...), or for rates (1, 1 or d)."""
        x: Tensor | None = getattr(self.recurrence, name)
        if x is None:
            return None
        _, h, t = self.recurrence.shape
        found = x[self.b if len(x) > 1 else 0, self.h // (h // x.shape[1])].double()
        return found if name in LinearRecurrence.PARAMETERS else factors.expand_axis(found, 0, t)

    @cached_property
    def log_decay(self) -> Tensor:
        """The running sum of the log decays, (t, 1 or d)."""
        decay, rates = self.get("decay"), self.get("rates")
        assert decay is not None
        return (decay if rates is None else decay * rates).clamp(min=GONE).cumsum(0)

    @cached_property
    def q(self) -> Tensor | None:
        """The queries (t, d)."""
        return self.get("q")

    @cached_property
    def k(self) -> Tensor | None:
        """The keys (t, d), scaled."""
        k, scale = self.get("k"), self.get("key_scale")
        return k if scale is None else scale.unsqueeze(-1) * (1 if k is None else k)

    @cached_property
    def beta(self) -> Tensor | None:
        """How much of a correction is written, (t,)."""
        return self.get("beta")

    def find_keys(self, first: int, last: int) -> Span:
        """Return the span of the keys that the queries first to last may see, both included."""
        return 0, last + 1

    def compute_rows(self, queries: Tensor, first: int, stop: int) -> Tensor:
        """Compute the entries (n, m) of queries (n,) by index on the keys first to stop; stop is beyond all of the queries."""
        rows = (
            self.compute_chunked_rows(queries, stop) if self.recurrence.is_chunked else self.compute_direct_rows(queries, stop)
        )
        skip, gate = self.get("skip"), self.get("gate")
        if skip is not None:
            rows = rows.clone() if rows.requires_grad else rows
            rows[torch.arange(len(queries), device=rows.device), queries] += skip[queries]
        rows = rows if gate is None else multiply_in_place(rows, gate[queries].unsqueeze(-1))
        return rows[:, first:]

    def compute_direct_rows(self, queries: Tensor, stop: int) -> Tensor:
        """Compute rows (n, stop) with one decay for all of d: each exponent is a difference, so that none overflows alone."""
        logs, key_logs, row_logs = self.log_decay[:, 0], self.get("key_logs"), self.get("row_logs")
        earlier = logs[:stop] if key_logs is None else logs[:stop] - key_logs[:stop]
        later = logs[queries] if row_logs is None else logs[queries] + row_logs[queries]
        exponents = later.unsqueeze(-1) - earlier
        keys = torch.arange(stop, device=logs.device)
        hidden = keys >= queries.unsqueeze(-1) if self.recurrence.is_strict else keys > queries.unsqueeze(-1)
        rows = exponents.masked_fill_(hidden, -torch.inf).exp_()
        if self.q is not None and self.k is not None:
            return multiply_in_place(rows, multiply_exactly(self.q[queries], self.k[:stop].T))
        rows = rows if self.q is None else multiply_in_place(rows, self.q[queries].sum(-1, keepdim=True))
        return rows if self.k is None else multiply_in_place(rows, self.k[:stop].sum(-1))

    def compute_chunked_rows(self, queries: Tensor, stop: int) -> Tensor:
        """Compute rows (n, stop), from the last chunk of keys to the first.

        adjoint (n, d) is the derivative of each row's output with respect to the state at the end of a chunk. No exponent is
        positive. Source of the triangular form: Yang et al. 2024, Parallelizing linear transformers with the delta rule.
        """
        q, k, logs = self.padded
        row_logs, strict = self.get("row_logs"), self.recurrence.is_strict
        query_logs = logs if row_logs is None else logs[: len(row_logs)] + row_logs.clamp(max=-GONE)
        rows = q.new_zeros(len(queries), -(-stop // CHUNK) * CHUNK)
        adjoint = q.new_zeros(len(queries), k.shape[1])
        for first in reversed(range(0, stop, CHUNK)):
            part = slice(first, first + CHUNK)
            inside = (queries >= first) & (queries < first + CHUNK)
            own = queries[inside]
            before = logs[first - 1] if first else torch.zeros_like(logs[0])
            end = logs[part][-1]
            entries = multiply_exactly(adjoint, (k[part] * (end - logs[part]).exp()).T)
            entries[inside] = multiply_with_decay(q[own], query_logs[own], own, k[part], logs[part], first, strict=strict)
            adjoint = adjoint * (end - before).exp()
            adjoint[inside] = q[own] * (query_logs[own] - before).exp()
            if self.beta is not None:
                chunk = first // CHUNK
                entries = torch.linalg.solve_triangular(
                    self.corrections[chunk], entries, upper=False, left=False, unitriangular=True
                )
                entries = entries * self.corrections_beta[part]
                adjoint = adjoint - multiply_exactly(entries, k[part] * (logs[part] - before).exp())
            rows[:, part] = entries
        return rows[:, :stop]

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and log decays, padded to whole chunks: keys by 0, log decays by the last."""
        t = len(self.log_decay)
        width = max(1, *(x.shape[1] for x in (self.q, self.k, self.log_decay) if x is not None))
        room = -t % CHUNK
        q, k = (
            torch.cat(
                [self.log_decay.new_ones(t, width) if x is None else x.expand(t, width), self.log_decay.new_zeros(room, width)]
            )
            for x in (self.q, self.k)
        )
        return q, k, torch.cat([self.log_decay, self.log_decay[-1:].expand(room, -1)])

    @cached_property
    def corrections_beta(self) -> Tensor:
        """beta, padded by 0 to whole chunks."""
        assert self.beta is not None
        return torch.nn.functional.pad(self.beta, (0, -len(self.beta) % CHUNK))

    @cached_property
    def corrections(self) -> list[Tensor]:
        """1 + beta_i k_i · k_j exp(Σ_{s=j+1..i} a_s) below the diagonal, (CHUNK, CHUNK) for each chunk."""
        _, k, logs = self.padded
        found = []
        for first in range(0, len(k), CHUNK):
            part = slice(first, first + CHUNK)
            places = torch.arange(first, first + CHUNK, device=k.device)
            below = multiply_with_decay(k[part], logs[part], places, k[part], logs[part], first, strict=True)
            found.append(below * self.corrections_beta[part].unsqueeze(-1))
        return found


def multiply_in_place(rows: Tensor, by: Tensor) -> Tensor:
    """Multiply rows of entries by factors, in place unless gradients need the rows as they were."""
    return rows * by if rows.requires_grad or by.requires_grad else rows.mul_(by)


def multiply_with_decay(
    q: Tensor, q_logs: Tensor, places: Tensor, k: Tensor, k_logs: Tensor, first: int, *, strict: bool
) -> Tensor:
    """Compute Σ_d q_id k_jd exp(q_logs_id - k_logs_jd), (n, m), of the keys j from `first` up to place i; 0 for later keys.

    places (n,) are those of the queries; strict leaves out the key at a query's own place.
    """
    hidden = (torch.arange(first, first + len(k), device=k.device) > places.unsqueeze(-1) - int(strict)).unsqueeze(-1)
    decays = (q_logs.unsqueeze(1) - k_logs).masked_fill_(hidden, -torch.inf).exp_()  # (n, m, 1 or d)
    if decays.shape[2] == 1:
        return decays.squeeze(-1) * multiply_exactly(q, k.T)
    return torch.einsum("id,jd,ijd->ij", q, k, decays)
