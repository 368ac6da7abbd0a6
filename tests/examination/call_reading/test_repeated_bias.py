"""The bias of a projection that is added twice is named, and biases of a layer's own are not."""

import pytest
import torch
from torch import nn

from examination.wrong_calls import C, D, H, Rotary
from regard.examination import examine


class Biased(Rotary):
    """Rotary attention whose projections of queries, keys and values have biases; `change` changes what they make."""

    is_turned = True

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, C) for _ in range(3))
        self.own = nn.Parameter(torch.randn(H, 1, D))

    def place(self, q, k):
        return super().place(q, k) if self.is_turned else (q, k)

    def change(self, q, k, v):
        return q, k, v

    def split(self, x):
        return self.change(*super().split(x))


class OwnBiasOfValues(Biased):
    """As of BEiT, beside that of the projection."""

    def change(self, q, k, v):
        return q, k, v + self.own


class OwnBiasOfQueries(Biased):
    """As in Transformer-XL."""

    is_turned = False

    def change(self, q, k, v):
        return q + self.own, k, v


@pytest.mark.parametrize("layer", [Biased, OwnBiasOfValues, OwnBiasOfQueries])
def test_biases_of_projections_and_of_the_layer_are_right(layer):
    torch.manual_seed(0)
    assert "wrong output" not in [one.kind for one in examine(layer()).findings]
