"""Loops over tokens as models write them out, by the tensors that each is given, and their matrices by definition."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Tokens:
    """Queries and keys (b, h, t, d), values (b, h, t, e), decays (b, h, t, d) and betas (b, h, t) between 0 and 1, u (h, d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    beta: Tensor
    u: Tensor

    @property
    def zeros(self) -> Tensor:
        return torch.zeros(*self.q.shape[:2], self.q.shape[3], self.v.shape[3], dtype=self.q.dtype)


Form = Callable[[Tokens], Tensor]


def retain(x: Tokens) -> Tensor:
    """As RetNet's recurrent form: one constant decay for each head, and a product of matrices. https://arxiv.org/abs/2307.08621"""
    gamma, state, outputs = x.a[:1, :, :1, :1], x.zeros, []
    for i in range(x.q.shape[2]):
        q, k, v = (y[:, :, i : i + 1] for y in (x.q, x.k, x.v))
        state = gamma * state + k.transpose(-1, -2) @ v
        outputs.append(q @ state)
    return torch.cat(outputs, 2)


def gate(x: Tokens) -> Tensor:
    """As gated linear attention, by einsum. https://arxiv.org/abs/2312.06635"""
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state = x.a[:, :, i, :, None] * state + torch.einsum("bhd,bhe->bhde", x.k[:, :, i], x.v[:, :, i])
        outputs.append(torch.einsum("bhd,bhde->bhe", x.q[:, :, i], state))
    return torch.stack(outputs, 2)


def gate_by_einsum(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for q, k, v, a in zip(*(y.unbind(2) for y in (x.q, x.k, x.v, x.a)), strict=True):
        state = torch.einsum("bhd,bhde->bhde", a, state) + torch.einsum("bhd,bhe->bhde", k, v)
        outputs.append(torch.einsum("bhde,bhd->bhe", state, q))
    return torch.stack(outputs, 2)


def gate_by_logs(x: Tokens) -> Tensor:
    state, outputs, logs = x.zeros, [], x.a.log()
    for i in range(x.q.shape[2]):
        kv = x.k[:, :, i].unsqueeze(-1) * x.v[:, :, i].unsqueeze(-2)
        state = state * logs[:, :, i].exp().unsqueeze(-1) + kv
        outputs.append((x.q[:, :, i].unsqueeze(-1) * state).sum(dim=-2))
    return torch.stack(outputs, dim=2)


def write_in_place(x: Tokens) -> Tensor:
    state, outputs = x.zeros, torch.empty_like(x.v)
    for i in range(x.q.shape[2]):
        state *= x.a[:, :, i, :, None]
        state += x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs[:, :, i] = torch.sum(state * x.q[:, :, i, :, None], -2)
    return outputs


def write_back(x: Tokens) -> Tensor:
    """With a buffer that holds the state."""
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state[:] = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
        state.copy_(state * 1)
    return torch.stack(outputs, 2)


def write_by_addcmul(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state = torch.addcmul(x.a[:, :, i, :, None] * state, x.k[:, :, i, :, None], x.v[:, :, i, None])
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def write_joined_heads(x: Tokens) -> Tensor:
    """With heads in the batch, as torch.bmm takes them."""
    b, h, t, e = x.v.shape
    q, k, v, a = (y.reshape(b * h, t, -1) for y in (x.q, x.k, x.v, x.a))
    state, outputs = x.zeros.reshape(b * h, -1, e), []
    for i in range(t):
        state = torch.baddbmm(state * a[:, i].unsqueeze(-1), k[:, i].unsqueeze(2), v[:, i].unsqueeze(1))
        outputs.append(torch.bmm(q[:, i].unsqueeze(1), state))
    return torch.cat(outputs, 1).view(b, h, t, e)


def write_values_first(x: Tokens) -> Tensor:
    """With the state transposed, (e, d)."""
    state, outputs = x.zeros.mT.contiguous(), []
    for i in range(x.q.shape[2]):
        state = state * x.a[:, :, i, None] + x.v[:, :, i].unsqueeze(-1) @ x.k[:, :, i].unsqueeze(-2)
        outputs.append((state @ x.q[:, :, i].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 2)


def start_with_none(x: Tokens) -> Tensor:
    state, outputs = None, []
    for i in range(x.q.shape[2]):
        kv = x.k[:, :, i, :, None] * x.v[:, :, i, None]
        state = kv if state is None else x.a[:, :, i, :, None] * state + kv
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def start_with_number(x: Tokens) -> Tensor:
    state, outputs = 0, []
    for i in range(x.q.shape[2]):
        state = state * x.a[:, :, i, :, None] + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def read_at_the_end(x: Tokens) -> Tensor:
    """With all products computed before the loop, and all states read after it."""
    state, states, products = x.zeros, [], x.k.unsqueeze(-1) * x.v.unsqueeze(-2)
    for i in range(x.q.shape[2]):
        state = x.a[:, :, i].unsqueeze(-1) * state + products[:, :, i]
        states.append(state)
    return (x.q.unsqueeze(-2) @ torch.stack(states, 2)).squeeze(-2)


def sum_up(x: Tokens) -> Tensor:
    """Without a decay."""
    state, outputs = torch.zeros_like(x.zeros), []
    for i in range(x.q.shape[2]):
        state = state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
    return torch.stack(outputs, 2)


def add_bonus(x: Tokens) -> Tensor:
    """As RWKV-5 and RWKV-6: a token's own write has a factor of its own. https://arxiv.org/abs/2404.05892"""
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        r, k, v, w = (y[:, :, i] for y in (x.q, x.k, x.v, x.a))
        kv = k.unsqueeze(-1) @ v.unsqueeze(-2)
        outputs.append(r.unsqueeze(-2) @ (x.u.unsqueeze(-1) * kv + state))
        state = kv + w.unsqueeze(-1) * state
    return torch.cat(outputs, 2)


def read_before_writing(x: Tokens) -> Tensor:
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        outputs.append((x.q[:, :, i, None] @ state).squeeze(2))
        state = x.a[:, :, i, :, None] * state + x.k[:, :, i, :, None] * x.v[:, :, i, None]
    return torch.stack(outputs, 2)


def correct(x: Tokens) -> Tensor:
    """As the gated delta rule is written token by token. https://arxiv.org/abs/2412.06464"""
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        q, k, v, beta = (y[:, :, i] for y in (x.q, x.k, x.v, x.beta.unsqueeze(-1)))
        state = state * x.a[:, :, i, :, None]
        memory = (state * k.unsqueeze(-1)).sum(dim=-2)
        delta = (v - memory) * beta
        state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append((state * q.unsqueeze(-1)).sum(dim=-2))
    return torch.stack(outputs, 2)


def correct_by_einsum(x: Tokens) -> Tensor:
    """With scaled keys in place of scaled values."""
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        state = state * x.a[:, :, i, :, None]
        error = x.v[:, :, i] - torch.einsum("bhd,bhde->bhe", x.k[:, :, i], state)
        state = state + torch.einsum("bhd,bhe->bhde", x.k[:, :, i] * x.beta[:, :, i, None], error)
        outputs.append(torch.einsum("bhd,bhde->bhe", x.q[:, :, i], state))
    return torch.stack(outputs, 2)


def correct_errors(x: Tokens) -> Tensor:
    """As a step of gradient descent on |S^T k - v|^2. https://arxiv.org/abs/2102.11174"""
    state, outputs = x.zeros, []
    for i in range(x.q.shape[2]):
        q, k, v, beta = (y[:, :, i] for y in (x.q, x.k, x.v, x.beta[..., None, None]))
        error = torch.einsum("bhde,bhd->bhe", state, k) - v
        state = state - beta * torch.einsum("bhd,bhe->bhde", k, error)
        outputs.append(torch.einsum("bhde,bhd->bhe", state, q))
    return torch.stack(outputs, 2)


# By definition: the state after each token as a matrix over the values of all tokens, (d, t)


def compute_matrix(x: Tokens, reads: str = "after", has_delta: bool = False) -> Tensor:
    """Compute the matrix (b, h, t, t) of a loop with these decays, token by token in float64."""
    b, h, t, d = x.q.shape
    rows, matrix = torch.zeros(b, h, t, t, dtype=torch.float64), torch.zeros(b, h, d, t, dtype=torch.float64)
    for i in range(t):
        q, k, a = (y[:, :, i].double().unsqueeze(-1) for y in (x.q, x.k, x.a))
        before, own = matrix, torch.zeros(b, h, 1, t, dtype=torch.float64)
        own[..., i] = 1
        matrix = a * matrix
        if has_delta:
            own = x.beta[:, :, i, None, None].double() * (own - (k * matrix).sum(2, keepdim=True))
        matrix = matrix + k * own
        read = before + (x.u.double().unsqueeze(-1) * k * own if reads == "bonus" else 0) if reads != "after" else matrix
        rows[:, :, i] = (q * read).sum(2)
    return rows


def hold_first(a: Tensor) -> Tensor:
    """The decays of retention: those of the first batch row, token and channel of each head."""
    return a[:1, :, :1, :1].expand_as(a)


FORMS: dict[str, tuple[Form, dict[str, object]]] = {
    "retention": (retain, {"decay": "constant"}),
    "gated, by einsum": (gate, {}),
    "gated, by einsum alone": (gate_by_einsum, {}),
    "gated, by logarithms and entries": (gate_by_logs, {}),
    "in place": (write_in_place, {}),
    "written back": (write_back, {}),
    "addcmul": (write_by_addcmul, {}),
    "heads in the batch": (write_joined_heads, {}),
    "values first": (write_values_first, {}),
    "from None": (start_with_none, {}),
    "from a number": (start_with_number, {}),
    "read at the end": (read_at_the_end, {}),
    "without a decay": (sum_up, {"decay": "none"}),
    "a bonus": (add_bonus, {"reads": "bonus"}),
    "read before writing": (read_before_writing, {"reads": "before"}),
    "a delta rule": (correct, {"has_delta": True}),
    "a delta rule of scaled keys": (correct_by_einsum, {"has_delta": True}),
    "a delta rule of errors": (correct_errors, {"has_delta": True, "decay": "none"}),
}


class SelectiveLayer(nn.Module):
    """The projections of Mamba's selective scan, and its matrix by definition."""

    def __init__(self, c: int = 7, n: int = 3) -> None:
        super().__init__()
        self.inner, self.delta, self.bc = nn.Linear(5, c), nn.Linear(c, c), nn.Linear(c, 2 * n)
        self.a_log, self.d = nn.Parameter(torch.rand(c, n)), nn.Parameter(torch.ones(c))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        u = nn.functional.silu(self.inner(x))
        b, c = self.bc(u).chunk(2, -1)
        return u, nn.functional.softplus(self.delta(u)), -torch.exp(self.a_log), b, c

    def define(self, x: Tensor) -> Tensor:
        """M_ij = Σ_n C_in B_jn Δ_j exp(A_n Σ_{s=j+1..i} Δ_s), for each channel."""
        _, delta, a, b, c = self.project(x)
        sums = delta.cumsum(1)
        spans = (sums.unsqueeze(2) - sums.unsqueeze(1)).unsqueeze(-1)  # (b, i, j, c, 1)
        spans = spans.where(torch.ones(x.shape[1], x.shape[1]).tril().bool()[None, :, :, None, None], torch.inf)
        return torch.einsum("bin,bjn,bjc,bijcn->bcij", c, b, delta, (spans * a).exp())


class LoopLayer(nn.Module):
    """A layer that projects its input to what a loop takes, and returns what that reads."""

    def __init__(self, form: Form, heads: int, d: int, e: int, width: int = 6):
        super().__init__()
        self.form, self.num_heads, self.d = form, heads, d
        self.features, self.values, self.beta = (nn.Linear(width, heads * n) for n in (3 * d, e, 1))
        self.u = nn.Parameter(torch.randn(heads, d))

    def project(self, x: Tensor) -> Tokens:
        features, v, beta = (
            y(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (self.features, self.values, self.beta)
        )
        q, k, a = features.split(self.d, -1)
        return Tokens(q, nn.functional.normalize(k, dim=-1), v, a.sigmoid(), beta.sigmoid().squeeze(-1), self.u)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.project(x)).transpose(1, 2).flatten(2)
