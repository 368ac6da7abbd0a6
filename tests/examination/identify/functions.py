"""Attention as a function (q, k, v) -> context with much that is right beside it, and mistakes in it."""

import math

import torch


def attention(
    scale=1.0, cap=None, slope=None, sink=None, exchanged=False, tiled=False, zeroed=False, norm=None, heads=None, turn=None
):
    def function(q, k, v):
        h, g, t = q.shape[1], k.shape[1], q.shape[-2]
        k, v = (x.repeat(1, h // g, 1, 1) if tiled else x.repeat_interleave(h // g, 1) for x in (k, v))
        k = k if heads is None else heads(k)
        q, k = (q, k) if turn is None else (turn(q), turn(k))
        scores = (k @ q.mT if exchanged else q @ k.mT) * scale / math.sqrt(q.shape[-1])
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        if slope is not None:
            scores = scores - slope * (torch.arange(t)[:, None] - torch.arange(t)).abs().to(scores.dtype)
        if not zeroed:
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        if sink is not None:
            scores = torch.cat((scores, torch.full_like(scores[..., :1], sink)), -1)
        weights = (scores.softmax(-1) if norm is None else norm(scores))[..., :t]
        return (weights.tril() if zeroed else weights) @ v

    return function


def draw_grouped_inputs(h=6, g=2):
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, 5, 8, generator=draw) for heads in (h, g, g))


HARMLESS = {
    "softcap": attention(cap=3.0),
    "bias by distance": attention(slope=0.5),
    "sink": attention(sink=0.3),
    "sink and bias": attention(sink=0.3, slope=0.5),
    "everything": attention(cap=2.0, slope=0.1, sink=-1.0),
}
