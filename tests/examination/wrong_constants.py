"""Wrong numbers in what is right otherwise: frequencies, slopes, factors on values."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_calls import C, D, H, Rotary


class RotaryOfOneFrequency(Rotary):
    """The exponents are divided as integers, so that all are 0."""

    def __init__(self):
        super().__init__()
        self.inv_freq = 1 / 100 ** (torch.arange(0, D, 2) // C)


class RotaryRising(Rotary):
    """The minus before the exponents is missing."""

    def __init__(self):
        super().__init__()
        self.inv_freq = 100 ** (torch.arange(0, D, 2) / D)


class ValuesScaled(Rotary):
    """The scale is on the values, too."""

    def attend(self, q, k, v):
        return super().attend(q, k, v / math.sqrt(D))


class ContextTimesWidth(Rotary):
    """The context is divided by the scale."""

    def attend(self, q, k, v):
        return super().attend(q, k, v) * math.sqrt(D)


class AlibiReversed(Rotary):
    """The slopes of ALiBi, the smallest first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** (-8 / H * torch.arange(H, 0, -1)))

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        t = q.shape[2]
        back = torch.arange(t)[:, None] - torch.arange(t)
        bias = (-self.slopes.to(q.dtype)[:, None, None] * back).masked_fill(back < 0, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, bias)


class AlibiOneSided(AlibiReversed):
    """ALiBi of an encoder without the absolute value of the distance."""

    def attend(self, q, k, v):
        t = q.shape[2]
        back = torch.arange(t)[:, None] - torch.arange(t)
        return F.scaled_dot_product_attention(q, k, v, -self.slopes.to(q.dtype).flip(0)[:, None, None] * back)


class ClippedTooNear(Rotary):
    """A table of vectors for distances up to 5, which are clipped at 3."""

    clipped = 3, 3

    def __init__(self):
        super().__init__()
        self.relative_keys = nn.Embedding(11, D)

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        place = torch.arange(q.shape[2])
        before, after = self.clipped
        rows = self.relative_keys((place - place[:, None]).clamp(-before, after) + 5)
        return ((q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, rows)) / math.sqrt(D)).softmax(-1) @ v


class ClippedOnOneSide(ClippedTooNear):
    """The same with one row for all later keys."""

    clipped = 5, 0


def choose_bucket(back, count=16, most=64):
    """T5's bucket of distances from a query to keys before it."""
    exact = count // 2
    far = exact + ((back.clamp_min(1) / exact).log() / math.log(most / exact) * (count - exact)).long()
    return torch.where(back < exact, back, far.clamp_max(count - 1))


class BucketsOfBothSides(Rotary):
    """T5's buckets of both sides in a causal layer."""

    def __init__(self):
        super().__init__()
        self.relative_attention_bias = nn.Embedding(32, H)

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        place = torch.arange(q.shape[2])
        later = place - place[:, None]
        bias = self.relative_attention_bias(choose_bucket(later.abs()) + 16 * (later > 0)).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(later > 0, -torch.inf))


class BucketsOfOneSide(BucketsOfBothSides):
    """T5's causal buckets in an encoder."""

    def attend(self, q, k, v):
        place = torch.arange(q.shape[2])
        back = (place[:, None] - place).clamp_min(0)
        bias = self.relative_attention_bias(choose_bucket(back, 32, 128)).permute(2, 0, 1)
        return F.scaled_dot_product_attention(q, k, v, bias)


class SquaredScores(Rotary):
    """Squares of scores in place of their exponentials."""

    def place(self, q, k):
        return q, k

    def powers(self, scores):
        return scores.square()

    def attend(self, q, k, v):
        powers = self.powers(q @ k.mT / math.sqrt(D)).tril()
        return powers / powers.sum(-1, keepdim=True) @ v


class AbsoluteScores(SquaredScores):
    """Absolute values of scores in place of their exponentials."""

    def powers(self, scores):
        return scores.abs()


class SoftmaxByLength(SquaredScores):
    """F.normalize of the weights, whose default is the length."""

    def attend(self, q, k, v):
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return F.normalize((q @ k.mT / math.sqrt(D)).masked_fill(hidden, -torch.inf).softmax(-1), dim=-1) @ v


class ContextDivided(Rotary):
    """The weighted sum is divided by the number of keys, as if it were a plain sum."""

    def attend(self, q, k, v):
        return super().attend(q, k, v) / torch.arange(1, q.shape[2] + 1)[:, None]


class AlibiBeforeScale(AlibiReversed):
    """ALiBi in what is divided by √d."""

    def attend(self, q, k, v):
        t = q.shape[2]
        back = torch.arange(t)[:, None] - torch.arange(t)
        scores = (q @ k.mT - self.slopes.to(q.dtype).flip(0)[:, None, None] * back) / math.sqrt(D)
        return scores.masked_fill(back < 0, -torch.inf).softmax(-1) @ v
