"""Mistakes in newer designs: norms of queries and keys, differential and latent attention, softcaps and sinks."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_calls import Rotary
from examination.wrong_sources import C, D, H, Written, join


class NormedAcrossHeads(Rotary):
    """F.normalize over dim=1, the heads, where dim=-1 belongs."""

    axis = 1

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(10.0))

    def place(self, q, k):
        return F.normalize(q, dim=self.axis) * self.temperature, F.normalize(k, dim=self.axis)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


class RMSNorm(nn.Module):
    """Weights of one head, and the mean square over these axes."""

    def __init__(self, axes):
        super().__init__()
        self.weight, self.axes = nn.Parameter(torch.ones(D)), axes

    def forward(self, x):
        return x * (x.square().mean(self.axes, keepdim=True) + 1e-6).rsqrt() * self.weight


class NormedOverAllHeads(Rotary):
    # the mean square runs over heads and width, of (b, h, t, d): https://github.com/EleutherAI/gpt-neox/pull/1367

    axes = (1, 3), (1, 3)

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = map(RMSNorm, self.axes)

    def place(self, q, k):
        return super().place(self.q_norm(q), self.k_norm(k))


class NormsOfTwoKinds(NormedOverAllHeads):
    """Queries over each head, keys over all of them."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(D), nn.RMSNorm(C)

    def place(self, q, k):
        k = self.k_norm(join(k)).unflatten(-1, (H, D)).transpose(1, 2)
        return Rotary.place(self, self.q_norm(q), k)


class NormedAcrossTokens(Rotary):
    """The norm runs over the tokens of a sequence: dim=2 of (b, h, t, d)."""

    def place(self, q, k):
        return super().place(F.normalize(q, dim=2) * 3, F.normalize(k, dim=2))


class Differential(nn.Module):
    """Differential attention: one softmax less lambda times another, norms of heads after it."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(C, 2 * C, bias=False) for _ in range(2))
        self.v_proj, self.o_proj = (nn.Linear(C, C, bias=False) for _ in range(2))
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (nn.Parameter(0.1 * torch.randn(D)) for _ in range(4))
        self.lambda_init, self.norm = 0.3, nn.RMSNorm(D, elementwise_affine=False)

    def get_lambda(self):
        first = (self.lambda_q1 * self.lambda_k1).sum().exp()
        return first - (self.lambda_q2 * self.lambda_k2).sum().exp() + self.lambda_init

    def combine(self, first, second):
        return first - self.get_lambda() * second

    def forward(self, x):
        t = x.shape[1]
        q, k = (f(x).unflatten(-1, (2, H, D)).permute(2, 0, 3, 1, 4) for f in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (H, D)).transpose(1, 2)
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        maps = [(a @ b.mT / math.sqrt(D)).masked_fill(hidden, -torch.inf).softmax(-1) for a, b in zip(q, k, strict=True)]
        return self.o_proj(join(self.norm(self.combine(*maps) @ v)) * (1 - self.lambda_init))


class DifferentialPlus(Differential):
    """The second softmax is added."""

    def combine(self, first, second):
        return first + self.get_lambda() * second


class DifferentialOfKernels(Differential):
    """The same with two calls of a kernel."""

    sign = -1

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, H, D)).permute(2, 0, 3, 1, 4) for f in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (H, D)).transpose(1, 2)
        first, second = (F.scaled_dot_product_attention(a, b, v, is_causal=True) for a, b in zip(q, k, strict=True))
        return self.o_proj(join(self.norm(first + self.sign * self.get_lambda() * second)) * (1 - self.lambda_init))


class DifferentialPlusOfKernels(DifferentialOfKernels):
    sign = 1


class SoftcapOfRawScores(Written):
    """The softcap before the scale, so that it bounds other numbers than those stated."""

    softcap = 2.0

    def attend(self, q, k, v):
        return self.weigh(self.softcap * torch.tanh(q @ k.mT / self.softcap) / math.sqrt(D)) @ v


class SoftcapForgotten(Rotary):
    # stated, and a kernel that is given none: https://github.com/vllm-project/vllm-metal/issues/665
    # https://github.com/EricLBuehler/mistral.rs/pull/1930

    def __init__(self):
        super().__init__()
        self.attn_logit_softcapping = 5.0


class SoftcapOfAnotherNumber(Written):
    softcap = 30.0

    def attend(self, q, k, v):
        cap = 20.0
        return self.weigh(cap * torch.tanh(q @ k.mT / math.sqrt(D) / cap)) @ v


class SinksTurned(Written):
    """Sinks whose sign is turned."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 2, H))

    def weigh(self, scores):
        b, _, t, _ = scores.shape
        sinks = -self.sinks.view(1, H, 1, 1).expand(b, H, t, 1)
        return torch.cat([self.hide(scores), sinks], -1).softmax(-1)[..., :-1]


class SinksLeftOut(SinksTurned):
    """The last column, that of the sinks, is cut off before the softmax in place of after it."""

    def weigh(self, scores):
        b, _, t, _ = scores.shape
        sinks = self.sinks.view(1, H, 1, 1).expand(b, H, t, 1)
        return torch.cat([self.hide(scores), sinks], -1)[..., :-1].softmax(-1)


class TableViewed(Written):
    """The rows of a table of relative positions are viewed as (heads, queries, keys), without a permute."""

    def __init__(self):
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.randn(11, H))
        places = torch.arange(6)
        self.register_buffer("relative_position_index", places[:, None] - places + 5)

    def place(self, q, k):
        return q, k

    def weigh(self, scores):
        rows = self.relative_position_bias_table[self.relative_position_index.flatten()]
        return (scores + self.arrange(rows)).softmax(-1)

    def arrange(self, rows):
        return rows.view(H, 6, 6)


class SinksAsKeys(Written):
    """The sinks' weights are summed with the last key."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 2, H))

    def weigh(self, scores):
        b, _, t, _ = scores.shape
        sinks = self.sinks.view(1, H, 1, 1).expand(b, H, t, 1)
        return torch.cat([sinks, self.hide(scores)], -1).softmax(-1)[..., :-1]


class Latent(nn.Module):
    """Latent keys and values, absorbed: queries of the latent's width, one key for all heads; a rotary part beside it."""

    nope, rope, latent = 6, 4, 10

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(C, H * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(C, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.latent)
        self.kv_b_proj = nn.Linear(self.latent, H * (self.nope + D), bias=False)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        self.softmax_scale = (self.nope + self.rope) ** -0.5
        self.register_buffer("inv_freq", 100 ** (-torch.arange(0, self.rope, 2) / self.rope), persistent=False)

    def absorb(self):
        """The parts of the weights that make keys, and values, of the latent: (h, n, latent) and (h, d, latent)."""
        both = self.kv_b_proj.weight.view(H, self.nope + D, self.latent)
        return both[:, : self.nope], both[:, self.nope :]

    def turn(self, x):
        angles = (torch.arange(x.shape[-2])[:, None] * self.inv_freq).to(x.dtype)
        one, other = x.chunk(2, -1)
        return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)

    def project(self, x):
        """Queries, the keys of all heads, the latent, and the part of the weights that makes values of it."""
        q = self.q_proj(x).unflatten(-1, (H, -1)).transpose(1, 2)
        q_nope, q_rope = q.split((self.nope, self.rope), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), -1)
        latent, k_rope = self.kv_a_layernorm(latent), self.turn(k_rope)
        keys, values = self.absorb()
        q = torch.cat((torch.einsum("bhtn,hnl->bhtl", q_nope, keys), self.turn(q_rope)), -1)
        k = torch.cat((latent, k_rope), -1).unsqueeze(1)
        return q, k, latent, values

    def forward(self, x):
        q, k, latent, values = self.project(x)
        scores = torch.matmul(q, k.mT) * self.softmax_scale
        weights = scores.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        context = torch.matmul(weights, latent.unsqueeze(1))
        return self.o_proj(self.join(torch.einsum("bhtl,hdl->bthd", context, values)))

    def join(self, heads):
        return heads.flatten(2)


class LatentHeadsMixed(Latent):
    """The weights viewed with the axes of heads and width exchanged."""

    def absorb(self):
        both = self.kv_b_proj.weight.view(self.nope + D, H, self.latent).transpose(0, 1)
        return both[:, : self.nope], both[:, self.nope :]


class LatentKeysAndValuesExchanged(Latent):
    """The part that makes values absorbed in the queries, and that of keys in the output."""

    def absorb(self):
        keys, values = super().absorb()
        return values, keys


class LatentScaledByWidth(Latent):
    """The scale of the latent's width, in which the product is taken."""

    def __init__(self):
        super().__init__()
        self.softmax_scale = (self.latent + self.rope) ** -0.5


class LatentScaledWithoutRope(Latent):
    def __init__(self):
        super().__init__()
        self.softmax_scale = self.nope**-0.5


class LatentValuesOfTheNextHead(Latent):
    """Each head's context multiplied by the weights that make the values of the next one."""

    def absorb(self):
        keys, values = super().absorb()
        return keys, values.roll(1, 0)


class LatentValuesTransposed(Latent):
    """The part that makes values stored as (latent, width), and read as (width, latent)."""

    def absorb(self):
        keys, values = super().absorb()
        return keys, values.reshape(H, self.latent, D).mT


class LatentValuesMixed(Latent):
    """Only the part that makes values viewed with the axes of heads and width exchanged."""

    def absorb(self):
        both = self.kv_b_proj.weight.view(self.nope + D, H, self.latent).transpose(0, 1)
        return super().absorb()[0], both[:, self.nope :]


class LatentHeadsReversed(Latent):
    """The last head first where heads are joined."""

    def join(self, heads):
        return heads.flip(2).flatten(2)


class LatentHeadsViewed(Latent):
    """Heads joined by a view without a transpose."""

    def join(self, heads):
        return heads.transpose(1, 2).reshape(heads.shape).flatten(2)


class LatentFolded(Latent):
    """The weights that make values folded into those of the output: one product from the latent to the output."""

    def fold(self, values):
        return torch.einsum("chd,hdl->chl", self.o_proj.weight.view(C, H, D), values)

    def forward(self, x):
        q, k, latent, values = self.project(x)
        context = F.scaled_dot_product_attention(
            q, k.expand(-1, H, -1, -1), latent.unsqueeze(1).expand(-1, H, -1, -1), is_causal=True, scale=self.softmax_scale
        )
        return torch.einsum("bhtl,chl->btc", context, self.fold(values))


class LatentFoldedInColumns(LatentFolded):
    """The output's weights viewed as (width, heads), not as (heads, width)."""

    def fold(self, values):
        return torch.einsum("cdh,hdl->chl", self.o_proj.weight.view(C, D, H), values)


class LatentFoldedByOtherHeads(LatentFolded):
    """The values' weights of one head folded into the output's weights of another."""

    def fold(self, values):
        return super().fold(values.flip(0))


class LatentFoldedIntoKeys(LatentFolded):
    """The part that makes keys folded into the output's weights."""

    def fold(self, values):
        return super().fold(self.absorb()[0])
