"""Layers whose positions enter as they should not: along the wrong axis, the same for all, in queries alone."""

import torch
from torch import Tensor, nn

T, C, H = 6, 12, 3
D = C // H


def rotate_half_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Each half-pair of x by its angle."""
    one, other = x.chunk(2, -1)
    return torch.cat((one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()), -1)


class Rotary(nn.Module):
    """Causal attention that returns its weights; `placed` turns queries and keys, each (b, h, t, d)."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.register_buffer("inv_freq", 100 ** (-torch.arange(0, D, 2) / D), persistent=False)

    def apply_positions(self, q, k):
        angles = torch.arange(q.shape[2])[:, None] * self.inv_freq
        return rotate_half_pairs(q, angles), rotate_half_pairs(k, angles)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, H, D).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.apply_positions(q, k)
        scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        weights = scores.softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class RotaryByHead(Rotary):
    # https://github.com/facebookresearch/xformers/issues/841
    # https://github.com/mlfoundations/open_lm/issues/4
    # https://github.com/lucidrains/ring-attention-pytorch/issues/15
    # https://github.com/vukrosic/leo-optimizer/pull/2
    def apply_positions(self, q, k):
        angles = (torch.arange(H)[:, None] * self.inv_freq).unsqueeze(1)
        return rotate_half_pairs(q, angles), rotate_half_pairs(k, angles)


class RotaryByBatch(Rotary):
    def apply_positions(self, q, k):
        angles = (torch.arange(len(q))[:, None] * self.inv_freq)[:, None, None]
        return rotate_half_pairs(q, angles), rotate_half_pairs(k, angles)


class RotaryOfQueries(Rotary):
    def apply_positions(self, q, k):
        return super().apply_positions(q, k)[0], k


class RotaryOfKeys(Rotary):
    def apply_positions(self, q, k):
        return q, super().apply_positions(q, k)[1]


class PositionsAllZero(Rotary):
    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(32, C)

    def apply_positions(self, q, k):
        return q, k

    def forward(self, x):
        return super().forward(x + self.positions(torch.zeros(x.shape[1], dtype=torch.long)))[0]


class SinesOfBatch(Rotary):
    # PositionalEncoding for (t, b, c), called with (b, t, c), as torch's tutorial has it
    def __init__(self):
        super().__init__()
        del self.inv_freq
        angles = torch.arange(64)[:, None] * 100 ** (-torch.arange(0, C, 2) / C)
        self.register_buffer("pe", torch.stack((angles.sin(), angles.cos()), -1).flatten(1).unsqueeze(1))

    def apply_positions(self, q, k):
        return q, k

    def forward(self, x):
        return super().forward(x + self.pe[: x.size(0)])[0]


class LearnedByBatch(PositionsAllZero):
    def forward(self, x):
        return Rotary.forward(self, x + self.positions(torch.arange(x.size(0))).unsqueeze(1))[0]


class AlibiOfQueries(nn.Module):
    """The penalty grows with the query's own place: softmax takes away what is the same for all keys."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1).view(H, 1, 1))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, H, D).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / D**0.5 - self.slopes * torch.arange(t)[:, None]
        weights = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))
