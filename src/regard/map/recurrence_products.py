"""Products of the matrix of a recurrence, or of its transpose, with vectors: one token after the other, without a matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.map.linear_recurrence import GONE, LinearRecurrence

STATE_NUMBERS = 2**22  # of the states of the heads that are multiplied together: 32 MiB of float64


def can_multiply_by_token(recurrence: LinearRecurrence) -> bool:
    """Return whether no factor of a recurrence is too large for float64 alone, as those of key_logs and row_logs may be."""
    return recurrence.key_logs is None and recurrence.row_logs is None


@dataclass(frozen=True, eq=False)
class TokenFactors:
    """The factors of a recurrence by token, in float64, of some batch rows (b,) and heads (h,) by index."""

    recurrence: LinearRecurrence
    rows: Tensor
    heads: Tensor

    @property
    def width(self) -> int:
        """The width of the keys."""
        tensors = self.recurrence.tensors
        return max(x.shape[3] for name, x in tensors.items() if name in ("decay", "rates", "q", "k"))

    def get(self, name: str, i: int) -> Tensor | None:
        """Return a factor of token i, (b or 1, h, 1 or d), or (b or 1, h, 1) of a factor without features."""
        x: Tensor | None = getattr(self.recurrence, name)
        if x is None:
            return None
        share = self.recurrence.shape[1] // x.shape[1]
        own = x[:, :, i if x.shape[2] > 1 else 0][:, self.heads // share]
        own = (own if len(own) == 1 else own[self.rows]).double()
        return own if own.dim() == 3 else own.unsqueeze(-1)

    def get_decay(self, i: int) -> Tensor:
        """Return what the state is multiplied by at token i, (b or 1, h, 1 or d, 1)."""
        decay, rates = self.get("decay", i), self.get("rates", i)
        assert decay is not None
        return (decay if rates is None else decay * rates).clamp(min=GONE).exp().unsqueeze(-1)

    def get_key(self, i: int) -> Tensor:
        """Return the scaled key of token i, (b or 1, h, 1 or d, 1)."""
        k, scale = self.get("k", i), self.get("key_scale", i)
        k = torch.ones(1, 1, self.width, dtype=torch.float64, device=self.heads.device) if k is None else k
        return (k if scale is None else k * scale).unsqueeze(-1)

    def get_query(self, i: int) -> Tensor:
        """Return the query of token i, (b or 1, h, 1 or d, 1)."""
        q = self.get("q", i)
        q = torch.ones(1, 1, self.width, dtype=torch.float64, device=self.heads.device) if q is None else q
        return q.unsqueeze(-1)


def multiply_by_token(recurrence: LinearRecurrence, rows: Tensor, heads: Tensor, x: Tensor) -> Tensor:
    """Compute M x, (b, h, t, n), of some batch rows and heads by index, in float64: x is (b, h, t, n)."""
    found = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for part in split_heads(recurrence, heads, x):
        factors = TokenFactors(recurrence, rows, heads[part])
        state = found.new_zeros(len(rows), len(heads[part]), factors.width, x.shape[3])
        for i in range(x.shape[2]):
            given, key, beta = x[:, part, i].double(), factors.get_key(i), factors.get("beta", i)
            kept = factors.get_decay(i) * state
            written = given if beta is None else beta * (given - (key * kept).sum(-2))
            state = kept + key * written.unsqueeze(-2)
            output = (factors.get_query(i) * (kept if recurrence.is_strict else state)).sum(-2)
            skip, gate = factors.get("skip", i), factors.get("gate", i)
            output = output if skip is None else output + skip * given
            found[:, part, i] = output if gate is None else output * gate
    return found


def multiply_transpose_by_token(recurrence: LinearRecurrence, rows: Tensor, heads: Tensor, r: Tensor) -> Tensor:
    """Compute Mᵀ r, (b, h, t, n), of some batch rows and heads by index, in float64: r is (b, h, t, n).

    adjoint is the derivative of r · (M v) with respect to the state after a token, from the last token to the first.
    """
    found = torch.empty(r.shape, dtype=torch.float64, device=r.device)
    for part in split_heads(recurrence, heads, r):
        factors = TokenFactors(recurrence, rows, heads[part])
        adjoint = found.new_zeros(len(rows), len(heads[part]), factors.width, r.shape[3])
        for i in reversed(range(r.shape[2])):
            gate, skip, beta, key = factors.get("gate", i), factors.get("skip", i), factors.get("beta", i), factors.get_key(i)
            given = r[:, part, i].double() if gate is None else gate * r[:, part, i].double()
            read = factors.get_query(i) * given.unsqueeze(-2)
            adjoint = adjoint if recurrence.is_strict else adjoint + read
            written = (key * adjoint).sum(-2)
            if beta is not None:
                written = beta * written
                adjoint = adjoint - key * written.unsqueeze(-2)
            found[:, part, i] = written if skip is None else written + skip * given
            adjoint = factors.get_decay(i) * (adjoint + read if recurrence.is_strict else adjoint)
    return found


def split_heads(recurrence: LinearRecurrence, heads: Tensor, x: Tensor) -> list[slice]:
    """Return the heads in parts whose states are few enough to be held together."""
    width = TokenFactors(recurrence, heads[:0], heads[:0]).width
    step = max(1, STATE_NUMBERS // max(1, len(x) * width * x.shape[3]))
    return [slice(start, start + step) for start in range(0, len(heads), step)]
