"""Mistakes beside rotary positions that few tokens do not show, and mistakes of values and outputs."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_calls import C, Rotary
from examination.wrong_sources import Written


class ScaledByTokens(Written):
    """The scale of the number of tokens, which is the width of a head in the first call."""

    def attend(self, q, k, v):
        return self.weigh(q @ k.mT / math.sqrt(q.shape[2])) @ v


class PositionsInBfloat16(Rotary):
    """Angles from positions in bfloat16, which has no numbers for all of those beyond 256."""

    def angles(self, t):
        return (torch.arange(t)[:, None].bfloat16() * self.inv_freq.bfloat16()).float()


class PositionsRestart(Rotary):
    """Positions of a block of four tokens, as of a grid."""

    def angles(self, t):
        return (torch.arange(t) % 4)[:, None] * self.inv_freq


class PositionsSaturate(Rotary):
    """A table of 32 positions, whose last row all later tokens get."""

    def angles(self, t):
        return torch.arange(t).clamp(max=31)[:, None] * self.inv_freq


class ChunksApart(Rotary):
    """Queries that see no key of an earlier chunk of 32."""

    def attend(self, q, k, v):
        i = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, (i[:, None] >= i) & (i[:, None] // 32 == i // 32))


class ValuesTiled(Rotary):
    """Keys repeated head by head, values as a whole."""

    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj = (nn.Linear(C, C // 2, bias=False) for _ in range(2))

    def attend(self, q, k, v):
        return super().attend(q, k.repeat_interleave(2, 1), v.repeat(1, 2, 1, 1))


class ValuesRotated(Rotary):
    """Values are rotated as queries and keys are."""

    def attend(self, q, k, v):
        return super().attend(q, k, self.place(v, v)[0])


class ValuesOfTheNextHead(Rotary):
    """Each head's weights meet the values of the next one."""

    def attend(self, q, k, v):
        return super().attend(q, k, v.roll(-1, 1))


class LastHeadTwice(Rotary):
    """The context of the last head but one in place of the last one's."""

    def attend(self, q, k, v):
        context = super().attend(q, k, v)
        return torch.cat((context[:, :-1], context[:, -2:-1]), 1)


class ContextViewed(Rotary):
    """Heads joined by a view without a transpose, beside rotary positions."""

    def forward(self, x):
        q, k, v = self.split(x)
        return self.o_proj(self.attend(*self.place(q, k), v).reshape(x.shape))


class WeightsOfTheFirstHead(Written):
    """The weights of the first head for all values."""

    def weigh(self, scores):
        return super().weigh(scores)[:, :1].expand_as(scores)


class HalfOfTheHeadsRotated(Rotary):
    """Two of four heads of queries are rotated, and all heads of keys."""

    def place(self, q, k):
        turned, k = super().place(q, k)
        return torch.cat((turned[:, :2], q[:, 2:]), 1), k
