"""Plain layers in many layouts, and each with one mistake: written as people write them, apart from regard's own formulas."""

import math

import torch
import torch.nn.functional as F
from torch import nn

C, H, T = 12, 3, 6
D = C // H


class Plain(nn.Module):
    """Multi-head causal attention, each step a method that a mistake replaces."""

    bias = True

    def __init__(self, c=C, heads=H, groups=None):
        super().__init__()
        self.c, self.h, self.d, self.g = c, heads, c // heads, groups or heads
        self.W_query = nn.Linear(c, c, bias=self.bias)
        self.W_key = nn.Linear(c, self.g * self.d, bias=self.bias)
        self.W_value = nn.Linear(c, self.g * self.d, bias=self.bias)
        self.out_proj = nn.Linear(c, c)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.roles(x)
        q, k, v = self.split(q, k, v)
        return self.out(self.join(self.mix(self.weights(q, k, b, t), v)))

    def roles(self, x):
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def split(self, q, k, v):
        q, k, v = (self.split_heads(x) for x in (q, k, v))
        return q, self.share(k), self.share(v)

    def split_heads(self, x):
        return x.view(*x.shape[:2], -1, self.d).transpose(1, 2)

    def share(self, k):
        return k.repeat_interleave(self.h // self.g, dim=1)

    def weights(self, q, k, b, t):
        return self.softmax(self.mask(self.scale(q @ k.transpose(-2, -1), t), t))

    def scale(self, scores, t):
        return scores / math.sqrt(self.d)

    def mask(self, scores, t):
        return scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)

    def softmax(self, scores):
        return torch.softmax(scores, dim=-1)

    def mix(self, weights, v):
        return weights @ v

    def join(self, context):
        b, h, t, d = context.shape
        return context.transpose(1, 2).reshape(b, t, h * d)

    def out(self, context):
        return self.out_proj(context)


def wrong(**methods):
    """A layer with some steps done otherwise."""
    return type("Wrong", (Plain,), methods)


def make_later_table(t):
    return torch.ones(t, t, dtype=torch.bool).triu(1)


def view_as_heads(self, x):
    return x.view(len(x), self.h, -1, self.d)


def only(which):
    def split(self, q, k, v):
        return tuple(
            view_as_heads(self, x) if name in which else self.split_heads(x) for name, x in zip("qkv", (q, k, v), strict=True)
        )

    return split


def nothing(self, scores, t):
    return scores


def over(axis):
    return wrong(mask=nothing, softmax=lambda self, scores: torch.softmax(scores, dim=axis))


def roles(q, k, v):
    def exchange_roles(self, x):
        parts = {"q": self.W_query(x), "k": self.W_key(x), "v": self.W_value(x), "x": x}
        return parts[q], parts[k], parts[v]

    return wrong(roles=exchange_roles)


SINGLE = {  # the field and the value that name each, and the layer that does it
    ("mask", "zero"): wrong(mask=lambda self, scores, t: scores.masked_fill(make_later_table(t), 0)),
    ("mask", "zeroed weights"): wrong(mask=nothing, softmax=lambda self, s: torch.softmax(s, -1).tril()),
    ("mask", "inverted"): wrong(mask=lambda self, s, t: s.masked_fill(~make_later_table(t), -torch.inf)),
    ("mask", "strict"): wrong(mask=lambda self, s, t: s.masked_fill(torch.ones(t, t).triu(0).bool(), -1e9)),
    ("mask", "beyond"): wrong(mask=lambda self, s, t: s.masked_fill(torch.ones(t, t).triu(2).bool(), -torch.inf)),
    ("mask", "transposed"): wrong(mask=lambda self, s, t: s.masked_fill(make_later_table(t).T, -torch.inf)),
    ("mask", "none"): wrong(mask=nothing),
    ("mask", "one added"): wrong(mask=lambda self, s, t: s + (~make_later_table(t)).to(s.dtype)),
    ("mask", "one added to hidden"): wrong(mask=lambda self, s, t: s + make_later_table(t).to(s.dtype)),
    ("mask", "minus one"): wrong(mask=lambda self, s, t: s.masked_fill(make_later_table(t), -1)),
    ("scale", "none"): wrong(scale=nothing),
    ("scale", "twice"): wrong(scale=lambda self, s, t: s / math.sqrt(self.d) / math.sqrt(self.d)),
    ("scale", "multiplied"): wrong(scale=lambda self, s, t: s * math.sqrt(self.d)),
    ("scale", "model"): wrong(scale=lambda self, s, t: s / math.sqrt(self.c)),
    ("scale", "tokens"): wrong(scale=lambda self, s, t: s / math.sqrt(t)),
    ("scale", "after"): wrong(scale=nothing, softmax=lambda self, s: torch.softmax(s, -1) / math.sqrt(self.d)),
    ("norm", "none"): wrong(mask=lambda self, s, t: s.masked_fill(make_later_table(t), 0), softmax=lambda self, s: s),
    ("norm", "absolute sum"): wrong(
        mask=lambda self, s, t: s.masked_fill(make_later_table(t), 0), softmax=lambda self, s: F.normalize(s, p=1, dim=-1)
    ),
    ("norm", "length"): wrong(
        mask=lambda self, s, t: s.masked_fill(make_later_table(t), 0), softmax=lambda self, s: F.normalize(s, dim=-1)
    ),
    ("norm", "sigmoid"): wrong(softmax=lambda self, s: torch.sigmoid(s)),
    ("norm", "twice"): wrong(softmax=lambda self, s: torch.softmax(torch.softmax(s, -1), -1)),
    ("norm", "exp"): wrong(softmax=lambda self, s: s.exp()),
    ("split", "qkv"): wrong(split_heads=view_as_heads),
    ("split", "q"): wrong(split=only("q")),
    ("split", "k"): wrong(split=only("k")),
    ("split", "v"): wrong(split=only("v")),
    ("merge", "viewed"): wrong(join=lambda self, context: context.reshape(len(context), -1, self.c)),
    ("roles", "kqv"): roles("k", "q", "v"),
    ("roles", "kkv"): roles("k", "k", "v"),
    ("roles", "qqv"): roles("q", "q", "v"),
    ("roles", "qkk"): roles("q", "k", "k"),
    ("roles", "qkq"): roles("q", "k", "q"),
    ("roles", "qkx"): roles("q", "k", "x"),
    ("roles", "turned"): wrong(mix=lambda self, weights, v: weights.transpose(-2, -1) @ v),
    ("output", "left out"): wrong(out=lambda self, context: context),
}
UNMASKED = {  # found where every token may be seen
    ("axis", "queries"): over(-2),
    ("axis", "heads"): over(1),
    ("axis", "batch"): over(0),
    ("axis", "heads and keys"): wrong(
        mask=nothing,
        softmax=lambda self, s: s.transpose(1, 2).flatten(2).softmax(-1).view(len(s), -1, *s.shape[1::2]).transpose(1, 2),
    ),
    ("axis", "everything"): wrong(mask=nothing, softmax=lambda self, s: s.flatten(2).softmax(-1).view_as(s)),
    ("split", "tokens"): wrong(
        split_heads=lambda self, x: x.view(*x.shape[:2], self.h, self.d), mask=nothing, join=lambda self, c: c.flatten(2)
    ),
}
TILED = wrong(share=lambda self, k: k.repeat(1, self.h // self.g, 1, 1))


class Core(nn.Module):
    """What layers of other layouts share: causal attention of q, k and v that are (b, h, t, d), joined."""

    def attention(self, q, k, v):
        t = q.shape[-2]
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(make_later_table(t), -torch.inf)
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


class Bare(Core):
    def __init__(self, c=C, d=7):
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(c, d) / 3) for _ in range(3))

    def forward(self, x):
        return self.attention(*((x @ w)[:, None] for w in (self.w_q, self.w_k, self.w_v)))


class PerHead(Core):
    """Parameters with an axis for heads, (h, c, d), and (h, d, c) on the way out."""

    def __init__(self):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(H, C, D) / 3) for _ in range(3))
        self.b_Q = nn.Parameter(torch.randn(H, D))
        self.W_O = nn.Parameter(torch.randn(H, D, C))

    def forward(self, x):
        q, k, v = (torch.einsum("btc,hcd->bhtd", x, w) for w in (self.W_Q, self.W_K, self.W_V))
        context = self.attention(q + self.b_Q[:, None], k, v)
        return torch.einsum("bthd,hdc->btc", context.unflatten(-1, (H, D)), self.W_O)


class Fused(Core):
    """One linear layer for all three, its columns in the order of `order`."""

    order = "3hd"

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        sizes = {"3": 3, "h": H, "d": D}
        made = self.qkv(x).view(*x.shape[:2], *(sizes[axis] for axis in self.order))
        q, k, v = made.permute(2 + self.order.index("3"), 0, 2 + self.order.index("h"), 1, 2 + self.order.index("d"))
        return self.proj(self.attention(q, k, v))


class ByHead(Fused):
    order = "h3d"


class WidthFirst(Fused):
    order = "d3h"


class FusedWrongly(Fused):
    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(3, b, H, t, D)
        return self.proj(self.attention(q, k, v))


class FusedGroups(Core):
    """h heads of queries and then g of keys and of values from one linear layer."""

    def __init__(self):
        super().__init__()
        self.Wqkv, self.out_proj = nn.Linear(24, 24 + 2 * 8), nn.Linear(24, 24, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.Wqkv(x).split((24, 8, 8), -1))
        return self.out_proj(self.attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)))


class TwoMatrices(Core):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(C, C, bias=False), nn.Linear(C, 2 * C, bias=False)
        self.to_out = nn.Sequential(nn.Linear(C, 8), nn.Dropout(0.1))

    def forward(self, x):
        q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, -1)
        return self.to_out(self.attention(*(part.unflatten(-1, (H, D)).transpose(1, 2) for part in (q, k, v))))


class Unnamed(Core):
    """Four layers in a list: no name tells what each is for."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(C, C) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (H, D)).transpose(1, 2) for layer in self.linears[:3])
        return self.linears[3](self.attention(q, k, v))


class Shared(Core):
    """One matrix for q, k and v."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(C, C)

    def forward(self, x):
        q = self.proj(x).unflatten(-1, (H, D)).transpose(1, 2)
        return self.attention(q, q, q)


class Conv1D(nn.Module):
    """A linear layer that keeps its weight as (c_in, c_out), as GPT-2 does."""

    def __init__(self, out, c):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(c, out) / 3), nn.Parameter(torch.randn(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class GPT2Like(Core):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * C, C), Conv1D(C, C)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.c_attn(x).split(C, -1))
        return self.c_proj(self.attention(q, k, v))


RIGHT = (Plain, Bare, PerHead, Fused, ByHead, WidthFirst, FusedGroups, TwoMatrices, Unnamed, Shared, GPT2Like)
