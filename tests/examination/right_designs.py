"""Right layers that depart from the common design on purpose, each in one thing."""

import math

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from regard import Given

C, H, T = 24, 4, 6
D = C // H
REAL = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * T]).bool()[:, None, None, :]  # padding on the left


def causal(scores):
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


class Heads(nn.Module):
    """Causal attention of several heads; `weights` and `normal` are each class's own."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = self.split(x)
        return self.join_heads(self.weights(q, k) @ v)

    def split(self, x):
        return [f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)]

    def join_heads(self, context):
        return self.o_proj(context.transpose(1, 2).flatten(2))

    def weights(self, q, k):
        return causal(q @ k.mT / math.sqrt(D)).softmax(-1)


class KeysAreValues(Heads):
    """One projection for keys and values."""

    def __init__(self):
        super().__init__()
        del self.v_proj

    def split(self, x):
        q, k = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        return q, k, k


class LeftPadded(Heads):
    def weights(self, q, k):
        return (q @ k.mT / math.sqrt(D)).masked_fill(~REAL, -torch.inf).softmax(-1)


class SpectralNorm(Heads):
    """A norm that moves its buffers with each call in training."""

    def __init__(self):
        super().__init__()
        parametrizations.spectral_norm(self.q_proj)


class TalkingHeads(Heads):
    """Heads mixed before and after the softmax, which returns its weights: their rows add to no 1."""

    def __init__(self):
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.eye(H) + 0.1 * torch.rand(H, H)) for _ in range(2))

    def forward(self, x):
        q, k, v = self.split(x)
        scores = torch.einsum("bhij,hg->bgij", q @ k.mT / math.sqrt(D), self.before)
        weights = torch.einsum("bhij,hg->bgij", causal(scores).softmax(-1), self.after)
        return self.join_heads(weights @ v), weights


class Gated(Heads):
    """A gate on the context, and states returned beside it that have the shape of weights."""

    def forward(self, x):
        q, k, v = self.split(x)
        return self.join_heads((self.weights(q, k) @ v) * q.sigmoid()), k.exp(), v


class Checkpointed(Heads):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


class Autocast(Heads):
    """Weights in float32, computed in bfloat16."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class OptionalContext(Heads):
    """Projections of its own for what it is not always given."""

    def __init__(self):
        super().__init__()
        self.k_context, self.v_context = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x, context=None):
        q, k, v = self.split(x)
        if context is not None:
            k, v = (f(context).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.k_context, self.v_context))
        return self.join_heads(self.weights(q, k) @ v)


def differential(q, k, v):
    """One softmax less a part of another: rows add to 0.7, and weights may be negative."""
    one, other = ((a @ b.mT / math.sqrt(a.shape[-1])) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
    return (causal(one).softmax(-1) - 0.3 * causal(other).softmax(-1)) @ v


class TemperedByPosition(Heads):
    """Queries are multiplied by a factor that grows with their position, from 16 tokens on, as in Llama 4."""

    def weights(self, q, k):
        places = torch.arange(q.shape[2], dtype=q.dtype)
        return super().weights(q * (1 + 0.1 * torch.log1p(((places + 1) / 16).floor())).unsqueeze(-1), k)


LEFT = {"expects": Given(REAL), "sample": torch.randn(2, T, C, generator=torch.Generator().manual_seed(4))}
PLAIN = (KeysAreValues, SpectralNorm, TalkingHeads, Gated, Checkpointed, Autocast, OptionalContext, TemperedByPosition)
DESIGNS = [
    *((one.__name__, one, {}) for one in PLAIN),
    ("LeftPadded", LeftPadded, LEFT),
    ("nn.MultiheadAttention with padding on the left", lambda: nn.MultiheadAttention(C, H, batch_first=True), LEFT),
    ("differential", lambda: differential, {}),
]
