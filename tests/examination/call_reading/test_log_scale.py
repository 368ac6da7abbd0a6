"""Scales by the logarithm of a length or a position are published definitions; others that change with it are mistakes."""

import math

import pytest
import torch

from examination.whole_models import Blocks
from examination.wrong_calls import D
from examination.wrong_sources import Written
from regard import examine


class Scaled(Written):
    """Attention by hand beside rotary positions, with a scale of the number of tokens."""

    def __init__(self, scale):
        super().__init__()
        self.scale_of = scale

    def attend(self, q, k, v):
        return self.weigh(q @ k.mT * self.scale_of(q.shape[2])) @ v


class ScaledWithoutPositions(Scaled):
    def place(self, q, k):
        return q, k


PUBLISHED = {
    "log t / √6": lambda t: math.log(t) / math.sqrt(D),
    "log t / (log 512 √6)": lambda t: math.log(t, 512) / math.sqrt(D),
    "log t / (log 2 √6)": lambda t: math.log2(t) / math.sqrt(D),
}


@pytest.mark.slow
@pytest.mark.parametrize("in_model", [False, True])
@pytest.mark.parametrize("make", [Scaled, ScaledWithoutPositions])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_scale_by_the_logarithm_of_the_length_is_named_as_published(make, name, in_model):
    torch.manual_seed(0)
    report = examine(Blocks(lambda: make(PUBLISHED[name])) if in_model else make(PUBLISHED[name]))
    assert report, str(report)
    assert any(f"= {name}, as in log-length scaled attention" in one.what for one in report.checked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scale", [lambda t: 1 / math.sqrt(t), lambda t: math.log(t), lambda t: math.sqrt(math.log(t) / D), lambda t: t / 100]
)
def test_other_scales_of_the_length_are_mistakes(scale):
    torch.manual_seed(0)
    assert [one.kind for one in examine(Scaled(scale)).findings] == ["wrong scale"]
