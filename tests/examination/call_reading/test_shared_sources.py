"""Two roles of one projection are a mistake where another projection makes nothing, and a design where none is left."""

import pytest
import torch
from torch import nn

from examination.wrong_calls import C, Rotary
from examination.wrong_order import JointValuesOfTheKeys, ValuesOfTheKeys
from regard import examine


class Tied(ValuesOfTheKeys):
    """Keys are values by design: there is no projection of values."""

    def __init__(self):
        super().__init__()
        self.v_proj = self.k_proj


class JointAndTied(JointValuesOfTheKeys):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(C, 2 * C)

    def split(self, x):
        q, k = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(2, -1))
        return q, k, k


@pytest.mark.parametrize("make", [Tied, JointAndTied])
def test_keys_that_are_values_by_design_are_right(make):
    torch.manual_seed(0)
    assert not examine(make()).findings


class OneModule(Rotary):
    """The module of one role under the name of another."""

    def __init__(self):
        super().__init__()
        self.k_proj = self.q_proj


class OneWeight(Rotary):
    def __init__(self):
        super().__init__()
        self.v_proj.weight = self.k_proj.weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "pair"), [(OneModule, "q_proj and k_proj"), (OneWeight, "k_proj and v_proj"), (Tied, "k_proj and v_proj")]
)
def test_projections_of_one_weight_are_asked_about(make, pair):
    torch.manual_seed(0)
    report = examine(make())
    assert f"whether it is intended that {pair} have one weight" in [one.what for one in report.unknown]
    assert not report.findings


@pytest.mark.slow
def test_projections_of_their_own_weights_are_not_asked_about():
    torch.manual_seed(0)
    assert not any("have one weight" in one.what for one in examine(Rotary()).unknown)
