"""Layers that do a right thing at the wrong time, or to another token, beside rotary positions."""

import torch
import torch.nn.functional as F
from torch import nn

from examination.right_variants import LatentUnabsorbed
from examination.wrong_calls import C, D, Rotary


class NormedAfterRotary(Rotary):
    """A LayerNorm of rotated heads takes away a mean over columns that the rotation has mixed."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)

    def place(self, q, k):
        q, k = super().place(q, k)
        return self.q_norm(q), self.k_norm(k)


class ValuesRolled(Rotary):
    """The values of the tokens before, and of the last token for the first."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v.roll(1, 2))


class ValuesOfTheTokenBefore(Rotary):
    """The same with zeros for the first token, and a causal mask."""

    def attend(self, q, k, v):
        return super().attend(q, k, F.pad(v, (0, 0, 1, 0))[:, :, :-1])


class KeysOfTheNextToken(Rotary):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k.roll(-1, 2), v)


class ScoresWithoutNegatives(Rotary):
    """A relu of scores, which the softmax does not need."""

    def change(self, scores):
        return scores.relu()

    def attend(self, q, k, v):
        t = q.shape[2]
        scores = self.change(q @ k.mT / D**0.5).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v


class ScoresClamped(ScoresWithoutNegatives):
    def change(self, scores):
        return scores.clamp(-0.5, 0.5)


class RotaryOfOnePosition(Rotary):
    """The position of the last token for all of them."""

    def angles(self, t):
        return torch.full((t, 1), t - 1) * self.inv_freq


class ValuesOfTheKeys(Rotary):
    """The keys' projection makes the values too, and the values' own is not called."""

    def split(self, x):
        q, k, _ = super().split(x)
        return q, k, k


class JointValuesOfTheKeys(Rotary):
    """One projection, of which the second third is read twice."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)
        del self.q_proj, self.k_proj, self.v_proj

    def split(self, x):
        q, k, _ = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return q, k, k


class LatentKeysNotRotated(LatentUnabsorbed):
    """The columns that the keys of all heads share, without their positions."""

    def turn(self, x):
        return x if x.dim() == 3 else super().turn(x)


class OutputBiasTwice(Rotary):
    def __init__(self):
        super().__init__()
        self.o_proj = nn.Linear(C, C)

    def forward(self, x):
        return super().forward(x) + self.o_proj.bias


class OutputTwice(Rotary):
    def forward(self, x):
        return self.o_proj(super().forward(x))


class OutputTransposed(Rotary):
    """The weight of a linear layer as it is stored, (out, in), on the right."""

    def forward(self, x):
        q, k, v = self.split(x)
        return self.attend(*self.place(q, k), v).transpose(1, 2).flatten(2) @ self.o_proj.weight


def scores_without_negatives(q, k, v):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).relu()
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v
