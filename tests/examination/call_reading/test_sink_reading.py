"""Sinks that are renormalized away, cut off at the wrong end or applied after the softmax are named, and right ones are not."""

import pytest
import torch
from torch import nn

from examination.wrong_calls import D, H, Rotary
from regard.examination import examine


class Sinks(Rotary):
    """A sink for each head beside the scores, last; `make_weights` is given both."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(H))

    def make_weights(self, scores, sinks):
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

    def attend(self, q, k, v):
        t = q.shape[2]
        scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        return self.make_weights(scores, self.sinks.view(1, H, 1, 1).expand(*scores.shape[:3], 1)) @ v


class SinksFirst(Sinks):
    def make_weights(self, scores, sinks):
        return torch.cat((sinks, scores), -1).softmax(-1)[..., 1:]


class SinksOfLogSumExp(Sinks):
    def make_weights(self, scores, sinks):
        return scores.softmax(-1) * (scores.logsumexp(-1, keepdim=True) - sinks).sigmoid()


class HeadFactors(Sinks):
    """A learned factor of each head, which is no sink."""

    def __init__(self):
        super().__init__()
        self.factors = self.sinks
        del self.sinks

    def attend(self, q, k, v):
        self.__dict__["sinks"] = self.factors
        return super().attend(q, k, v)

    def make_weights(self, scores, sinks):
        return scores.softmax(-1) * sinks


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Sinks, SinksFirst, SinksOfLogSumExp, HeadFactors])
def test_sinks_that_take_their_part_and_factors_of_heads_are_right(layer):
    torch.manual_seed(0)
    assert not examine(layer()).findings
