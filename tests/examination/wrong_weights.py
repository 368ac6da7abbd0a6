"""Layers beside rotary positions whose scores do not become weights, or whose weights or values are changed then."""

import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_calls import C, D, H, Rotary


def find_later(scores):
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


class NoSoftmax(Rotary):
    def make_weights(self, scores):
        return scores.tril()

    def attend(self, q, k, v):
        return self.make_weights(q @ k.mT / D**0.5) @ v


class SigmoidWeights(NoSoftmax):
    def make_weights(self, scores):
        return scores.masked_fill(find_later(scores), -torch.inf).sigmoid()


class LogarithmsOfWeights(NoSoftmax):
    def make_weights(self, scores):
        return F.log_softmax(scores.masked_fill(find_later(scores), -1e9), dim=-1)


class ScoresSquared(NoSoftmax):
    def make_weights(self, scores):
        return scores.square().masked_fill(find_later(scores), -torch.inf).softmax(-1)


class ScoresRoundedDown(NoSoftmax):
    """// where / belongs."""

    def attend(self, q, k, v):
        scores = q @ k.mT // D**0.5
        return scores.masked_fill(find_later(scores), -torch.inf).softmax(-1) @ v


class HiddenAfterSoftmax(NoSoftmax):
    def make_weights(self, scores):
        return scores.softmax(-1).masked_fill(find_later(scores), -1e9)


class WeightsTransposed(NoSoftmax):
    def make_weights(self, scores):
        return scores.masked_fill(find_later(scores), -torch.inf).softmax(-1).mT


class SinksCutAtTheWrongEnd(NoSoftmax):
    """Sinks stand last, and the first column is left out."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(H))

    def make_weights(self, scores):
        sinks = self.sinks.view(1, H, 1, 1).expand(*scores.shape[:3], 1)
        return self.leave_sinks_out(torch.cat((scores.masked_fill(find_later(scores), -torch.inf), sinks), -1).softmax(-1))

    def leave_sinks_out(self, weights):
        return weights[..., 1:]


class SinksRenormalized(SinksCutAtTheWrongEnd):
    def leave_sinks_out(self, weights):
        return F.normalize(weights[..., :-1], p=1, dim=-1)


class SinksAfterSoftmax(SinksCutAtTheWrongEnd):
    def make_weights(self, scores):
        return scores.masked_fill(find_later(scores), -torch.inf).softmax(-1) / (1 + self.sinks.exp().view(H, 1, 1))


class ValueBiasTwice(Rotary):
    def __init__(self):
        super().__init__()
        self.v_proj = nn.Linear(C, C)

    def attend(self, q, k, v):
        return super().attend(q, k, v + self.v_proj.bias.view(H, 1, D))


class ValuesNormedAsKeys(Rotary):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(D), nn.RMSNorm(D)

    def split(self, x):
        q, k, v = super().split(x)
        return self.q_norm(q), self.k_norm(k), self.k_norm(v)


class GroupedKeysViewed(Rotary):
    """Keys and values of two heads, viewed without a transpose."""

    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj = (nn.Linear(C, 2 * D, bias=False) for _ in range(2))

    def split(self, x):
        b, t, _ = x.shape
        k, v = (f(x).view(b, 2, t, D).repeat_interleave(H // 2, 1) for f in (self.k_proj, self.v_proj))
        return self.q_proj(x).unflatten(-1, (H, D)).transpose(1, 2), k, v


def values_rolled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v.roll(1, -2), is_causal=True)
