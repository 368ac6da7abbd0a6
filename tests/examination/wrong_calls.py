"""Mistakes beside rotary positions, biases, convolutions or routing: no formula of the outputs shows them."""

import torch
import torch.nn.functional as F
from torch import nn

T, C, H = 6, 24, 4
D = C // H


class Rotary(nn.Module):
    """Causal attention of a kernel with rotary positions in halves."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.register_buffer("inv_freq", 100 ** (-torch.arange(0, D, 2) / D), persistent=False)

    def angles(self, t):
        return torch.arange(t)[:, None] * self.inv_freq

    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)
        return turn_halves(q, angles.cos(), angles.sin()), turn_halves(k, angles.cos(), angles.sin())

    def split(self, x):
        return [f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)]

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.split(x)
        return self.o_proj(self.attend(*self.place(q, k), v).transpose(1, 2).flatten(2))


def turn_halves(x, cos, sin, sign=-1):
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos + sign * other * sin, other * cos + one * sin), -1)


def turn_neighbors(x, cos, sin):
    one, other = x[..., ::2], x[..., 1::2]
    return torch.stack((one * cos - other * sin, other * cos + one * sin), -1).flatten(-2)


class RotaryStylesMixed(Rotary):
    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)
        return turn_halves(q, angles.cos(), angles.sin()), turn_neighbors(k, angles.cos(), angles.sin())


class RotaryWithoutMinus(Rotary):
    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)
        return tuple(turn_halves(x, angles.cos(), angles.sin(), 1) for x in (q, k))


class RotaryCosAndSinExchanged(Rotary):
    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)
        return tuple(turn_halves(x, angles.sin(), angles.cos()) for x in (q, k))


class RotaryOpposite(Rotary):
    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)
        return turn_halves(q, angles.cos(), angles.sin()), turn_halves(k, angles.cos(), -angles.sin())


class RotaryOfQueriesInKernel(Rotary):
    def place(self, q, k):
        return super().place(q, k)[0], k


class RotaryWithOtherBase(Rotary):
    """Another base for keys than for queries."""

    def place(self, q, k):
        angles = torch.arange(q.shape[2])[:, None] * self.inv_freq.to(q.dtype).square()
        return super().place(q, k)[0], turn_halves(k, angles.cos(), angles.sin())


class RotaryKeysLater(Rotary):
    """Keys start at position 1."""

    def place(self, q, k):
        angles = (self.angles(q.shape[2]) + self.inv_freq).to(q.dtype)
        return super().place(q, k)[0], turn_halves(k, angles.cos(), angles.sin())


class RotaryScaledTwice(Rotary):
    def attend(self, q, k, v):
        return super().attend(q * D**-0.5, k, v)


class RotaryUnscaled(Rotary):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


class RotaryScaledByModel(Rotary):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=C**-0.5)


class RotaryMaskInverted(Rotary):
    """True for what is hidden, to a kernel where it means seen."""

    def attend(self, q, k, v):
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)


class NormedScaledByInput(nn.Module):
    # scale = dim ** -0.5 beside heads of another width: the formula is hidden by the norm
    def __init__(self):
        super().__init__()
        self.heads, self.scale, self.norm = 3, C**-0.5, nn.LayerNorm(C)
        self.to_qkv, self.to_out = nn.Linear(C, 3 * 3 * D, bias=False), nn.Linear(3 * D, C)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (3, D)).transpose(1, 2) for y in self.to_qkv(self.norm(x)).chunk(3, -1))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.mT * self.scale).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class RotaryTiled(Rotary):
    """Grouped keys beside rotary positions, repeated where repeat_interleave belongs."""

    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj = (nn.Linear(C, C // 2, bias=False) for _ in range(2))

    def attend(self, q, k, v):
        return super().attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))


class RotaryViewed(Rotary):
    """Heads of a view without a transpose, before the rotation."""

    def split(self, x):
        b, t, _ = x.shape
        q, k, v = super().split(x)
        q, k = (f(x).reshape(b, H, t, D) for f in (self.q_proj, self.k_proj))
        return q, k, v


class RotaryExchanged(Rotary):
    def attend(self, q, k, v):
        return super().attend(k, q, v)


class AlibiSign(Rotary):
    """A penalty that favors far keys."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1).view(H, 1, 1))

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        t = q.shape[2]
        back = torch.arange(t)[:, None] - torch.arange(t)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        return F.scaled_dot_product_attention(q, k, v, (self.slopes * back).to(q.dtype).masked_fill(hidden, -torch.inf))


class TemperatureInEvaluation(Rotary):
    def attend(self, q, k, v):
        return super().attend(q if self.training else q / 0.7, k, v)


class DeadAdapter(Rotary):
    def __init__(self):
        super().__init__()
        self.lora_a, self.lora_b = (nn.Linear(*sizes, bias=False) for sizes in ((C, 2), (2, C)))
        for part in (self.lora_a, self.lora_b):
            nn.init.zeros_(part.weight)

    def split(self, x):
        return super().split(x + self.lora_b(self.lora_a(x)))


class ChosenAmongAll(Rotary):
    """Only the tokens of the highest scores in the sequence are attended from."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(C, 1)

    def forward(self, x):
        scores = self.router(x).squeeze(-1)
        chosen = scores.topk(min(9, x.shape[1]), -1).indices
        return x + super().forward(x) * (torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores.sigmoid()).unsqueeze(-1)


class ConvolvedBothWays(Rotary):
    def __init__(self):
        super().__init__()
        self.convolve = nn.Conv1d(C, C, 3, padding=1)

    def forward(self, x):
        return super().forward(self.convolve(x.mT).mT)


class NormOfGroups(Rotary):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, C)

    def forward(self, x):
        return super().forward(self.norm(x.mT).mT)


class NormOfBatch(Rotary):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(C, track_running_stats=False)

    def forward(self, x):
        return super().forward(self.norm(x.mT).mT)


class ShiftedAround(Rotary):
    """A shift of half of the columns that brings the first tokens what the last ones are."""

    def forward(self, x):
        one, other = x.chunk(2, -1)
        return super().forward(torch.cat((one, other.roll(1, 1)), -1))


class HiddenByZeros(Rotary):
    """Nothing is hidden, and a projection of zeros lets nothing be seen yet."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.o_proj.weight)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)
