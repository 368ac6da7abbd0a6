"""Right layers as people write them, in many styles."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import Causal, Everything, Window
from regard.mechanism import positions

C, H, T = 24, 4, 6
D = C // H
ALL = {"expects": Everything()}


class OneHead(nn.Module):
    """A head of a lecture, with a mask in a buffer."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(C, D, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(17, 17)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        t = x.shape[1]
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = F.softmax(wei.masked_fill(self.tril[:t, :t] == 0, float("-inf")), dim=-1)
        return self.dropout(wei) @ self.value(x)


class Fused(nn.Module):
    """As minGPT and nanoGPT have it."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.n_head = H

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (one.view(b, t, H, c // H).transpose(1, 2) for one in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class FusedInFive(nn.Module):
    """As timm has it: an encoder."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.scale = H, D**-0.5
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, D).permute(2, 0, 3, 1, 4)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class WithWeights(nn.Module):
    """Returns its weights beside its output, of all heads."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf)
        weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Einsums(nn.Module):
    """Weights of each head in one parameter, and letters for axes."""

    def __init__(self):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(H, C, D) / C**0.5) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(H, D, C) / C**0.5)

    def forward(self, x):
        q, k, v = (torch.einsum("btc,hcd->bthd", x, w) for w in (self.W_Q, self.W_K, self.W_V))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
        hidden = torch.ones_like(scores).triu(1).bool()
        weights = scores.masked_fill(hidden, -1e5).softmax(-1)
        return torch.einsum("bhqk,bkhd,hdc->bqc", weights, v, self.W_O)


class Block(nn.Module):
    """Norms, residuals and a feed-forward part around it."""

    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(C), Fused(), nn.LayerNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class PostNorm(nn.Module):
    """The norm after the residual, as in 2017."""

    def __init__(self):
        super().__init__()
        self.attn, self.norm = WithWeights(), nn.LayerNorm(C)

    def forward(self, x):
        return self.norm(x + self.attn(x)[0])


class Rotary(nn.Module):
    """Queries and keys turned by where they stand."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, H, D).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        angles = torch.outer(torch.arange(t, dtype=torch.float32), 100 ** (-torch.arange(0, D, 2) / D))
        cos, sin = (f(torch.cat((angles, angles), -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        q, k = (one * cos + torch.cat((-one[..., D // 2 :], one[..., : D // 2]), -1) * sin for one in (q, k))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Alibi(nn.Module):
    """A penalty for distance, of another size in each head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, H, D).permute(2, 0, 3, 1, 4)
        place = torch.arange(t)
        bias = -(place[:, None] - place).abs() * 2.0 ** -torch.arange(1, H + 1).view(H, 1, 1)
        bias = bias.masked_fill(place > place[:, None], -torch.inf).to(x.dtype)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class LearnedBias(nn.Module):
    """A number for each distance, learned, and no scale beside √d; T5 without the scale is in the families."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.relative = nn.Embedding(63, H)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, H, D).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        place = torch.arange(t)
        distance = (place[None] - place[:, None]).clamp(-31, 31) + 31
        scores = q @ k.mT * D**-0.5 + self.relative(distance).permute(2, 0, 1)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    """Two heads of keys for four of queries, and another width out than in."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (
            nn.Linear(C, C, bias=False),
            nn.Linear(C, C // 2, bias=False),
            nn.Linear(C, C // 2, bias=False),
        )
        self.wo = nn.Linear(C, 10)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        k, v = (one.repeat_interleave(2, dim=1) for one in (k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class OneKeyHead(nn.Module):
    """All heads of queries share one of keys; sinks."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(C, C), nn.Linear(C, D), nn.Linear(C, D)
        self.sinks, self.o_proj = nn.Parameter(torch.randn(H)), nn.Linear(C, C)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, H, D).transpose(1, 2)
        scores = q @ self.k_proj(x).unsqueeze(1).mT / D**0.5
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        sinks = self.sinks.view(1, H, 1, 1).expand(b, H, t, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return self.o_proj((weights @ self.v_proj(x).unsqueeze(1)).transpose(1, 2).flatten(2))


class Softcapped(Fused):
    """A bound on the scores, before the mask."""

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (one.view(b, t, H, c // H).transpose(1, 2) for one in self.c_attn(x).split(c, dim=2))
        scores = 3.0 * torch.tanh(q @ k.mT * D**-0.5 / 3.0)
        weights = scores.masked_fill(torch.ones(t, t).triu(1).bool(), torch.finfo(x.dtype).min).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(b, t, c))


class Windowed(Fused):
    """The token itself and two before it."""

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (one.view(b, t, H, c // H).transpose(1, 2) for one in self.c_attn(x).split(c, dim=2))
        back = torch.arange(t)[:, None] - torch.arange(t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back < 3))
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class NormedHeads(nn.Module):
    """Queries and keys of length one, and a temperature that is learned."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(C, C, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class WithCache(Fused):
    """Keys and values of earlier tokens, which its queries come after."""

    def forward(self, x, layer_past=None, use_cache=False):
        b, t, c = x.shape
        q, k, v = (one.view(b, t, H, c // H).transpose(1, 2) for one in self.c_attn(x).split(c, dim=2))
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), -2), torch.cat((layer_past[1], v), -2)
        before = k.shape[-2] - t
        mask = torch.ones(t, before + t, dtype=torch.bool).tril(before)
        y = self.c_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, c))
        return (y, (k, v)) if use_cache else y


class Frozen(Fused):
    """Only the output projection is trained."""

    def __init__(self):
        super().__init__()
        self.c_attn.requires_grad_(False)


class Positions(nn.Module):
    """Learned places added before, and dropout after."""

    def __init__(self):
        super().__init__()
        self.positions, self.attn, self.drop = nn.Embedding(32, C), Fused(), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.attn(x + self.positions(torch.arange(x.shape[1]))))


class Sinusoids(nn.Module):
    """Places by sine and cosine, in an encoder."""

    def __init__(self):
        super().__init__()
        self.attn = FusedInFive()

    def forward(self, x):
        return self.attn(x + positions.sinusoidal(x.shape[1], C).to(x))


class QueryKeyValue(nn.Module):
    """forward(query, key, value), as in the annotated Transformer."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(C, C) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q, k, v = (
            lin(x).view(b, -1, H, D).transpose(1, 2) for lin, x in zip(self.linears[:3], (query, key, value), strict=True)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(D)
        context = torch.matmul(scores.softmax(dim=-1), v)
        return self.linears[-1](context.transpose(1, 2).contiguous().view(b, -1, C))


class HeadList(nn.Module):
    """Heads in an nn.ModuleList, one beside the other."""

    def __init__(self):
        super().__init__()
        self.heads, self.proj = nn.ModuleList(OneHead() for _ in range(H)), nn.Linear(C, C)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class Padded(nn.Module):
    """Lengths of its own; where rows may see nothing their context is 0."""

    def __init__(self, lengths, blind=False):
        super().__init__()
        self.lengths, self.blind = torch.tensor(lengths), blind
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(C, C, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        real = torch.arange(x.shape[1]) < self.lengths[:, None]
        seen = real[:, None, None, :] & real[:, None, :, None] if self.blind else real[:, None, None, :]
        weights = (q @ k.mT / D**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Packed(Fused):
    """Documents one after the other in a sequence."""

    def __init__(self, ids):
        super().__init__()
        self.ids = torch.tensor(ids)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (one.view(b, t, H, c // H).transpose(1, 2) for one in self.c_attn(x).split(c, dim=2))
        seen = (self.ids[:, None] == self.ids) & torch.ones(t, t, dtype=torch.bool).tril()
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(b, t, c))


def causal_function(q, k, v):
    """A function with a finite number for -inf."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(torch.triu(torch.ones(scores.shape[-2:]), diagonal=1) == 1, -1e9)
    return torch.softmax(scores, dim=-1) @ v


def by_steps(q, k, v):
    """The softmax taken by hand, the maximum subtracted."""
    scores = torch.einsum("...qd,...kd->...qk", q, k) / k.shape[-1] ** 0.5
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True) @ v


LAYERS = [
    *((make, {}) for make in (OneHead, Fused, WithWeights, Einsums, Block, PostNorm, Rotary, Alibi, Grouped, OneKeyHead)),
    *((make, {}) for make in (Softcapped, NormedHeads, WithCache, Frozen, Positions, HeadList)),
    (Windowed, {"expects": Causal() & Window(2)}),
    *((make, ALL) for make in (FusedInFive, LearnedBias, Sinusoids, QueryKeyValue)),
]
FUNCTIONS = [(causal_function, {}), (by_steps, ALL)]
