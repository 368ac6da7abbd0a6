"""A norm of keys that normalizes values or queries is named, and norms that are shared by design are not."""

import pytest
import torch
from torch import nn

from examination.wrong_calls import D, Rotary
from regard.examination import examine


class Normed(Rotary):
    """Norms of queries and keys before rotary positions; `value_norm` is the norm of the values."""

    value_norm = ""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm, self.v_norm = (nn.RMSNorm(D) for _ in range(3))
        for norm in (self.q_norm, self.k_norm, self.v_norm):
            nn.init.normal_(norm.weight, 1, 0.2)

    def attend(self, q, k, v):
        return super().attend(q, k, getattr(self, self.value_norm)(v) if self.value_norm else v)

    def place(self, q, k):
        return super().place(self.q_norm(q), self.k_norm(k))


class ValuesByOwnNorm(Normed):
    value_norm = "v_norm"


class OneNorm(Normed):
    def __init__(self):
        super().__init__()
        self.norm = self.q_norm
        del self.q_norm, self.k_norm

    def place(self, q, k):
        return Rotary.place(self, self.norm(q), self.norm(k))


class OneNormNamedAfterKeys(Normed):
    def __init__(self):
        super().__init__()
        del self.q_norm

    def place(self, q, k):
        return Rotary.place(self, self.k_norm(q), self.k_norm(k))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Normed, ValuesByOwnNorm, OneNorm, OneNormNamedAfterKeys])
def test_norms_of_their_own_or_of_one_for_both_are_right(layer):
    torch.manual_seed(0)
    assert "wrong roles" not in [one.kind for one in examine(layer()).findings]
