"""Layers that read from the wrong place: another sequence, an earlier call, padding, or a bias after the softmax."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_calls import Rotary, turn_halves

T, C, H = 6, 24, 4
D = C // H


def split(x):
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).flatten(2)


class Cross(nn.Module):
    """Queries of x, keys and values of another sequence."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(C, C, bias=False) for _ in range(4))

    def project(self, x, context):
        return self.to_q(x), self.to_k(context), self.to_v(context)

    def forward(self, x, context):
        q, k, v = map(split, self.project(x, context))
        return self.to_out(join(F.scaled_dot_product_attention(q, k, v)))


class CrossOfItself(Cross):
    # keys and values of the queries' own sequence
    def project(self, x, context):
        return self.to_q(x), self.to_k(x), self.to_v(x)


class CrossKeysOfItself(Cross):
    """Keys of the wrong sequence, values of the right one."""

    def project(self, x, context):
        return self.to_q(x), self.to_k(x), self.to_v(context)


class CrossValuesOfItself(Cross):
    def project(self, x, context):
        return self.to_q(x), self.to_k(context), self.to_v(x)


class CrossTurned(Cross):
    """Queries of the other sequence, keys and values of its own."""

    def project(self, x, context):
        return self.to_q(context), self.to_k(x), self.to_v(x)


class DecoderBlock(nn.Module):
    """Self attention, and cross attention that reads its memory."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.cross_attn = (nn.MultiheadAttention(C, H, batch_first=True) for _ in range(2))

    def read(self, x, memory):
        return self.cross_attn(x, memory, memory)[0]

    def forward(self, x, memory):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.self_attn(x, x, x, attn_mask=hidden)[0]
        return x + self.read(x, memory)


class CrossIgnored(DecoderBlock):
    """A decoder block that gives its cross attention its own states twice."""

    def read(self, x, memory):
        return self.cross_attn(x, x, x)[0]


class KeyOfQuery(nn.Module):
    # forward(query, key, value) that projects its keys from the query
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(C, C) for _ in range(4)])

    def sources(self, query, key, value):
        return query, query, value

    def forward(self, query, key, value):
        q, k, v = (split(f(x)) for f, x in zip(self.linears[:3], self.sources(query, key, value), strict=True))
        scores = q @ k.mT / math.sqrt(D)
        return self.linears[-1](join(scores.softmax(-1) @ v))


class ValueOfQuery(KeyOfQuery):
    def sources(self, query, key, value):
        return query, key, query


class KeyAndValueExchanged(KeyOfQuery):
    def sources(self, query, key, value):
        return query, value, key


class CacheKept(Rotary):
    # those of other sequences too: https://github.com/deepspeedai/DeepSpeed/pull/2669
    # https://github.com/awslabs/keys_values/issues/45

    def __init__(self):
        super().__init__()
        self.kept = []

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        self.kept.append((k, v))
        k, v = (torch.cat(parts, 2) for parts in zip(*self.kept, strict=True))
        t, n = q.shape[2], k.shape[2]
        seen = torch.ones(t, n, dtype=torch.bool).tril(n - t)
        return F.scaled_dot_product_attention(q, k, v, seen)


class LastKeysKept(Rotary):
    """The last keys of the call before stand before the first ones of this call."""

    def __init__(self):
        super().__init__()
        self.last = None

    def attend(self, q, k, v):
        before, self.last = self.last, (k[:, :, -2:].detach(), v[:, :, -2:].detach())
        if before is not None and before[0].shape[:2] == k.shape[:2]:
            k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
        t, n = q.shape[2], k.shape[2]
        return F.scaled_dot_product_attention(q, k, v, torch.ones(t, n, dtype=torch.bool).tril(n - t))


class KeysOfTheFirstSequence(Rotary):
    """Keys and values are kept by their shape, so that equal inputs do not show it."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def attend(self, q, k, v):
        return super().attend(q, *self.kept.setdefault(k.shape, (k, v)))


class Written(Rotary):
    """Attention by hand, with rotary positions; what happens to scores and weights is each class's own."""

    hides = True

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1).view(H, 1, 1))

    def bias(self, t):
        back = torch.arange(t)[:, None] - torch.arange(t)
        return -self.slopes * back.abs()

    def hide(self, scores):
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if self.hides else scores

    def weigh(self, scores):
        return self.hide(scores).softmax(-1)

    def attend(self, q, k, v):
        return self.weigh(q @ k.mT / math.sqrt(D)) @ v


class BiasAfterSoftmax(Written):
    """A bias by distance that is added to the weights."""

    def weigh(self, scores):
        return self.hide(scores).softmax(-1) + self.bias(scores.shape[-1]).tril().to(scores.dtype)


class LearnedBiasAfterSoftmax(Written):
    """Swin's table of relative positions, added to the weights."""

    hides = False

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 2 * 600))

    def weigh(self, scores):
        t = scores.shape[-1]
        back = torch.arange(t)[:, None] - torch.arange(t) + 600
        return scores.softmax(-1) + self.table[:, back]


class MaskAfterSoftmaxBesideRotary(Written):
    # https://github.com/huggingface/pytorch-image-models/pull/2236
    def weigh(self, scores):
        return scores.softmax(-1).tril()


class OverQueriesBesideRotary(Written):
    hides = False

    def weigh(self, scores):
        return scores.softmax(-2)


class OverHeadsBesideRotary(Written):
    hides = False

    def weigh(self, scores):
        return scores.softmax(1)


class SoftmaxTwiceBesideRotary(Written):
    def weigh(self, scores):
        return self.hide(self.hide(scores).softmax(-1)).softmax(-1)


class ScaledAfterSoftmaxBesideRotary(Written):
    def attend(self, q, k, v):
        return self.weigh(q @ k.mT) / math.sqrt(D) @ v


class PaddingZeroedAfterSoftmax(Written):
    """Weights of padded keys are set to 0 after a softmax over all keys."""

    lengths = (3, 6)

    def weigh(self, scores):
        real = torch.arange(scores.shape[-1]) < torch.tensor(self.lengths)[:, None]
        return scores.softmax(-1) * real[:, None, None].to(scores.dtype)


class FilledUpToBlocks(Rotary):
    """Keys and values are filled up with zeros to a multiple of 8, and the softmax runs over them."""

    def attend(self, q, k, v):
        more = -k.shape[2] % 8
        return F.scaled_dot_product_attention(q, *(F.pad(x, (0, 0, 0, more)) for x in (k, v)))


class PaddedQueriesRotatedLate(Rotary):
    """Positions that count from the end of the sequence for keys only."""

    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)
        return turn_halves(q, angles.cos(), angles.sin()), turn_halves(k, angles.flip(0).cos(), angles.flip(0).sin())

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)
