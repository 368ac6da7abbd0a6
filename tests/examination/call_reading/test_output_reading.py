"""A module's output is its output projection of the heads, once, or what differs is named."""

import pytest
import torch
from torch import nn

from examination.wrong_calls import C, Rotary
from regard import examine


class Right(Rotary):
    """One projection with a bias, which may be zero, and a weight that may be its own transpose."""

    def __init__(self, bias, weight):
        super().__init__()
        self.o_proj = nn.Linear(C, C)
        nn.init.constant_(self.o_proj.bias, bias)
        self.o_proj.weight.data = weight(self.o_proj.weight.data)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [0.0, 0.5])
@pytest.mark.parametrize("weight", [lambda w: w, lambda w: w + w.T, lambda w: torch.eye(C)])
def test_one_projection_is_right_whatever_its_weights(bias, weight):
    torch.manual_seed(0)
    assert not examine(Right(bias, weight)).findings


class TiedToValues(Rotary):
    """The output's weight is that of the values, transposed, by design."""

    def __init__(self):
        super().__init__()
        del self.o_proj

    def forward(self, x):
        q, k, v = self.split(x)
        return self.attend(*self.place(q, k), v).transpose(1, 2).flatten(2) @ self.v_proj.weight


def test_a_weight_that_values_and_output_share_is_right():
    torch.manual_seed(0)
    assert not examine(TiedToValues()).findings
