"""Whole models for the tests, and attention put into them that sees what another rule says."""

import types

import torch
from torch import nn

import regard
from regard import GPT2, GPT2Config
from regard.mechanism import heads

T, WIDTH = 8, 35


def gpt2(**settings):
    torch.manual_seed(0)
    sizes = {"layers": 4, "heads": 5, "width": WIDTH, "context": 11, "vocabulary": 101, **settings}
    model = GPT2(GPT2Config(**sizes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() == 2 else None
    return model.eval()


def seeing(attention, mask):
    """An attention of regard's with another rule."""

    def forward(self, x, past=None, rest=None):
        q, k, v = self.project(x)
        k, v, offset = (k, v, 0) if past is None else past(k, v)
        return self.out_proj(heads.join(regard.attention(q, k, v, mask, offset=offset)))

    attention.forward = types.MethodType(forward, attention)


def kinds(report):
    return [one.kind for one in report.findings]


def read_intent(finding):
    """The rules that the cure of a finding says to pass."""
    names = {name: getattr(regard, name) for name in ("Causal", "Documents", "Everything", "Prefix", "Window")}
    return eval(finding.cure.rpartition("expects=")[2].removesuffix("."), {"torch": torch, **names})


class ByHand(nn.Module):
    """A small model around one attention written out by hand, which leaves its traces."""

    def __init__(self, seen, size=16):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(40, 12), nn.Embedding(size, 12)
        self.head = nn.Linear(12, 40)
        self.attention, self.last, self.calls = Weighing(seen), None, []

    def forward(self, ids):
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        self.last = x = x + self.attention(x)
        self.calls.append(1)
        self.head.weight.data.mul_(1.01)
        self.register_buffer("late", x)
        return self.head(x)


class Weighing(nn.Module):
    """softmax(q kᵀ) v of what `seen` lets through."""

    def __init__(self, seen):
        super().__init__()
        self.qkv, self.seen = nn.Linear(12, 36), seen

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 12**0.5 + self.seen(x.shape[1])).softmax(-1) @ v


def causal(t):
    return torch.zeros(t, t).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)


class Still(ByHand):
    """The same without traces."""

    def forward(self, ids):
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(x + self.attention(x))


class Block(nn.Module):
    """A norm, an attention layer and a feed-forward part, with residuals."""

    def __init__(self, attention, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = attention
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


class Blocks(nn.Module):
    """A language model of two blocks around an attention layer, with learned positions of 512 tokens or none."""

    def __init__(self, make, width=24, has_positions=False):
        super().__init__()
        self.token, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.place = nn.Embedding(512, width) if has_positions else None
        self.blocks = nn.Sequential(*(Block(make(), width) for _ in range(2)))

    def forward(self, ids):
        x = self.token(ids)
        x = x if self.place is None else x + self.place(torch.arange(ids.shape[1]))
        return self.head(self.blocks(x))
