"""Linear attention in chunks of tokens as models write it out, by the tensors that each is given: (b, h, t, ...)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 4


@dataclass
class Tokens:
    """Queries and keys (b, h, t, d), values (b, h, t, e), log decays of heads (b, h, t) and of features (b, h, t, d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    logs: Tensor
    feature_logs: Tensor

    def split(self) -> tuple[Tensor, ...]:
        """All of them as (b, h, chunks, CHUNK, ...), in order; the last chunk is padded by 0."""
        room = -self.q.shape[2] % CHUNK
        parts = (x if x.dim() == 4 else x.unsqueeze(3) for x in (self.q, self.k, self.v, self.logs, self.feature_logs))
        q, k, v, logs, feature_logs = (F.pad(x, (0, 0, 0, room)).unflatten(2, (-1, CHUNK)) for x in parts)
        return q, k, v, logs.squeeze(4), feature_logs


Form = Callable[[Tokens], Tensor]


def join(y: Tensor, x: Tokens) -> Tensor:
    return y.flatten(2, 3)[:, :, : x.q.shape[2]]


def hide_later(x: Tensor, value: float) -> Tensor:
    return x.masked_fill(torch.ones(x.shape[-2:]).triu(1).bool(), value)


def sum_segments(x: Tensor) -> Tensor:
    """segsum of the published listing: sums from j + 1 to i."""
    n = x.shape[-1]
    x = x.unsqueeze(-1).repeat(*[1] * x.dim(), n).masked_fill(~torch.ones(n, n).tril(-1).bool(), 0)
    return hide_later(x.cumsum(-2), -torch.inf)


def scan_dually(x: Tokens, initial: Tensor | None = None) -> Tensor:
    """ssd_minimal_discrete, as its listing. https://arxiv.org/abs/2405.21060"""
    q, k, v, logs, _ = x.split()
    c, b, v = (y.permute(0, 2, 3, 1, 4) for y in (q, k, v))  # (b, chunks, tokens, h, d)
    sums = logs.cumsum(-1)
    inside = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, sum_segments(logs).exp(), v)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, torch.exp(sums[:, :, :, -1:] - sums), v)
    initial = torch.zeros_like(states[:, :1]) if initial is None else initial.expand_as(states[:, :1])
    states = torch.cat([initial, states], 1)
    decays = sum_segments(F.pad(sums[:, :, :, -1], (1, 0))).exp()
    states = torch.einsum("bhzc,bchpn->bzhpn", decays, states)[:, :-1]
    outside = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, sums.exp())
    return join((inside + outside).permute(0, 3, 1, 2, 4), x)


def gate_heads(x: Tokens) -> Tensor:
    """Simple gated linear attention, with a loop over the states alone, as flash-linear-attention tests it."""
    q, k, v, logs, _ = x.split()
    sums = logs.cumsum(-1)
    written = k.mT @ (v * (sums[..., -1:] - sums).exp().unsqueeze(-1))
    states = torch.zeros_like(written)
    for i in range(1, q.shape[2]):
        states[:, :, i] = states[:, :, i - 1].clone() * sums[:, :, i - 1, -1, None, None].exp() + written[:, :, i - 1]
    outside = (q * sums.unsqueeze(-1).exp()) @ states
    scores = q @ k.mT * (sums.unsqueeze(-1) - sums.unsqueeze(-2)).exp()
    return join(outside + hide_later(scores, 0) @ v, x)


def sum_up(x: Tokens) -> Tensor:
    """Without a decay, with a running sum over chunks."""
    q, k, v, *_ = x.split()
    sums = (k.mT @ v).cumsum(2)
    states = torch.cat([torch.zeros_like(sums[:, :, :1]), sums[:, :, :-1]], 2)
    return join(q @ states + hide_later(q @ k.mT, 0) @ v, x)


def gate_in_a_loop(x: Tokens) -> Tensor:
    """A loop over chunks, the last of which may be shorter."""
    state, outputs = torch.zeros(*x.q.shape[:2], x.q.shape[3], x.v.shape[3], dtype=x.q.dtype), []
    for i in range(0, x.q.shape[2], CHUNK):
        q, k, v, logs = (y[:, :, i : i + CHUNK] for y in (x.q, x.k, x.v, x.logs))
        sums = logs.cumsum(-1)
        decays = hide_later(sums.unsqueeze(-1) - sums.unsqueeze(-2), -torch.inf).exp()
        outputs.append((q @ k.mT * decays) @ v + (q * sums.exp().unsqueeze(-1)) @ state)
        state = state * sums[..., -1, None, None].exp() + (k * (sums[..., -1:] - sums).exp().unsqueeze(-1)).mT @ v
    return torch.cat(outputs, 2)


def gate_features(x: Tokens) -> Tensor:
    """Gated linear attention with a decay for each feature, in queries and keys. https://arxiv.org/abs/2312.06635"""
    q, k, v, _, logs = x.split()
    sums = logs.cumsum(-2)
    last, queries, keys = sums[..., -1:, :], q * sums.exp(), k * (-sums).exp()
    state, outputs = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]), torch.empty_like(v)
    for i in range(q.shape[2]):
        inside = hide_later(queries[:, :, i] @ keys[:, :, i].mT, 0) @ v[:, :, i]
        outputs[:, :, i] = queries[:, :, i] @ state + inside
        state = last[:, :, i].mT.exp() * state + (k * (last - sums).exp())[:, :, i].mT @ v[:, :, i]
    return join(outputs, x)


def retain(x: Tokens) -> Tensor:
    """A retention's chunkwise form, with its decays as powers. https://arxiv.org/abs/2307.08621"""
    gamma, n = list_decays(x), torch.arange(CHUNK)
    q, k, v, *_ = x.split()
    decays = hide_later(gamma ** (n[:, None] - n).clamp(min=0), 0)
    state, outputs = 0, []
    for i in range(q.shape[2]):
        one, other, values = q[:, :, i], k[:, :, i], v[:, :, i]
        inside = ((one @ other.mT) * decays) @ values
        outputs.append(inside if i == 0 else inside + (one @ state) * gamma ** (n[:, None] + 1))
        state = other.mT @ (values * decays[:, -1].unsqueeze(-1)) + gamma**CHUNK * state
    return join(torch.stack(outputs, 2), x)


def list_decays(x: Tokens) -> Tensor:
    return (1 - 2.0 ** (-2 - torch.arange(x.q.shape[1], dtype=x.q.dtype)))[:, None, None]


def divide_rows(x: Tokens) -> Tensor:
    """As RetNet's own code, which divides each row by what keeps it below a bound. https://arxiv.org/abs/2307.08621"""
    gamma, n = list_decays(x), torch.arange(CHUNK)
    decays = hide_later(gamma ** (n[:, None] - n).clamp(min=0), 0)
    scale = decays.sum(-1, keepdim=True).sqrt()
    last = decays[:, -1].sum(-1)[:, None, None]
    q, k, v, *_ = (y.transpose(1, 2) for y in x.split())
    scores = q @ k.mT * (decays / scale)
    inner_scale = scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)
    inside = (scores / inner_scale) @ v
    written, states, scales = k.mT @ (v * (decays[:, -1].unsqueeze(-1) / last)), [], []
    state, state_scale = torch.zeros_like(written[:, 0]), written.new_ones(len(written), written.shape[2], 1, 1)
    for i in range(q.shape[1]):
        states.append(state / state_scale)
        scales.append(state_scale)
        state = state * gamma**CHUNK + written[:, i]
        state_scale = state.detach().abs().sum(-2, keepdim=True).max(-1, keepdim=True).values.clamp(min=1)
    cross_scale = torch.stack(scales, 1)
    whole = torch.maximum(inner_scale, cross_scale)
    outside = (q * (gamma ** (n[:, None] + 1) / (scale / last))) @ torch.stack(states, 1)
    return join((inside / (whole / inner_scale) + outside / (whole / cross_scale)).transpose(1, 2), x)


def compute_matrix(x: Tokens, kind: str) -> Tensor:
    """Compute the matrix (b, h, t, t) by its definition, Σ_d q_id k_jd exp(Σ_{s=j+1..i} a_sd), for the decays of a kind."""
    logs = {"heads": x.logs.unsqueeze(3), "features": x.feature_logs, "none": torch.zeros_like(x.feature_logs[..., :1])}
    constant = list_decays(x).log().expand_as(x.logs.unsqueeze(3))
    sums = (logs | {"constant": constant})[kind].cumsum(2)
    spans = (sums.unsqueeze(3) - sums.unsqueeze(2)).expand(-1, -1, -1, -1, x.q.shape[3])
    later = torch.ones(spans.shape[2:4]).triu(1).bool().unsqueeze(-1)
    return torch.einsum("bhid,bhjd,bhijd->bhij", x.q, x.k, spans.masked_fill(later, -torch.inf).exp())


FORMS: dict[str, tuple[Form, str]] = {
    "dual": (scan_dually, "heads"),
    "decays of heads": (gate_heads, "heads"),
    "no decays": (sum_up, "none"),
    "in a loop": (gate_in_a_loop, "heads"),
    "decays of features": (gate_features, "features"),
    "powers": (retain, "constant"),
    "divided rows": (divide_rows, "rows"),
}


class ChunkLayer(nn.Module):
    """A layer that projects its input to tokens, mixes them in chunks, and projects what that gives."""

    def __init__(self, form: Form, heads: int, d: int, e: int, width: int = 6) -> None:
        super().__init__()
        self.form, self.num_heads, self.d, self.e = form, heads, d, e
        self.features, self.values, self.decays = (nn.Linear(width, heads * n) for n in (3 * d, e, 1))
        self.out = nn.Linear(heads * e, width)

    def project(self, x: Tensor) -> Tokens:
        """The tokens of an input (b, t, width)."""
        features, v, logs = (
            F.linear(x, y.weight, y.bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y in (self.features, self.values, self.decays)
        )
        q, k, feature_logs = features.split(self.d, -1)
        return Tokens(q * self.d**-0.5, k, v, F.logsigmoid(logs.squeeze(-1)), F.logsigmoid(feature_logs))

    def mix(self, x: Tokens) -> Tensor:
        """What the form makes of tokens, (b, h, t, e)."""
        return self.form(replace(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.project(x)).transpose(1, 2).flatten(2))
