"""The axes of a norm are read from what went in and what came out."""

import pytest
import torch
from torch import nn

from examination.wrong_calls import D, Rotary
from regard import Everything, examine
from regard.examination.call_reading.norm_reading import ACROSS, TOKENS


def normalize(x, axes):
    return x / x.square().mean(axes, keepdim=True).sqrt()


class OneNormed(Rotary):
    """Only queries, or only keys, have a norm of each head."""

    def __init__(self, who, norm):
        super().__init__()
        self.who, self.norm = who, norm(D)

    def place(self, q, k):
        return super().place(*((self.norm(x) if who == self.who else x) for who, x in (("q", q), ("k", k))))


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize(("who", "written"), [("q", "queries, {}; keys are not"), ("k", "keys, {}; queries are not")])
def test_what_alone_is_normalized_is_stated(who, written, norm):
    report = examine(OneNormed(who, norm))
    assert report, str(report)
    how = "over each head" if norm is nn.RMSNorm else "by norm"
    assert f"the norm of {written.format(how)}" in [one.what for one in report.checked]


class NormedOverAnotherAxis(Rotary):
    """F.normalize over heads, tokens or the width, before the rotation."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def place(self, q, k):
        return super().place(*(3 * nn.functional.normalize(x, dim=self.axis) for x in (q, k)))

    def attend(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "named"), [(1, ACROSS), (2, TOKENS), (3, "")])
def test_the_axis_of_a_norm_is_read_through_the_rotation_after_it(axis, named):
    torch.manual_seed(0)
    report = examine(NormedOverAnotherAxis(axis), expects=Everything())
    assert [one.kind for one in report.findings] == (["wrong axis"] if named else [])
    assert f"normalized over {named}" in str(report.findings) or not named
