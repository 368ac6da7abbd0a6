"""The axes of a norm are read from what went in and what came out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examination.wrong_calls import D, Rotary
from examination.wrong_designs import NormsOfTwoKinds
from regard import Everything, examine
from regard.examination.call_reading.norm_reading import ACROSS, ALL, EACH, TOKENS, read_axes


def normalize(x, axes):
    return x / x.square().mean(axes, keepdim=True).sqrt()


@given(
    h=st.sampled_from([2, 3, 5]),
    t=st.sampled_from([4, 7]),
    d=st.sampled_from([3, 6, 8]),
    seed=st.integers(0, 99),
    by=st.booleans(),
)
def test_the_axes_are_read_whatever_the_shape_and_the_weights(h, t, d, seed, by):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, h, t, d, generator=draw, dtype=torch.float64)
    weights = torch.rand(h, 1, d, generator=draw, dtype=torch.float64) + 0.5 if by else 1.0
    for axes, expected in ((-1, EACH), ((1, 3), ALL), (1, ACROSS)):
        assert read_axes(x, normalize(x, axes) * weights) == expected
    assert read_axes(x, 3 * x) is None


@pytest.mark.parametrize("shift", [0.5])
def test_another_change_is_no_norm(shift):
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    assert read_axes(x, x + shift) is None


@pytest.mark.parametrize("shape", [(5, 7), (5, 1), (3, 5, 1), (1, 7)])
def test_factors_of_a_position_are_no_norm(shape):
    """They are the same in all sequences: cos without sin, or a temperature by the number of tokens."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 5, 7, generator=draw, dtype=torch.float64)
    assert read_axes(x, x * (torch.rand(shape, generator=draw, dtype=torch.float64) + 0.3)) is None


def test_norms_of_two_kinds_are_one_finding_of_both():
    (finding, *_) = examine(NormsOfTwoKinds()).findings
    assert "over each head, but keys over all heads together" in finding.evidence


class OneNormed(Rotary):
    """Only queries, or only keys, have a norm of each head."""

    def __init__(self, who, norm):
        super().__init__()
        self.who, self.norm = who, norm(D)

    def place(self, q, k):
        return super().place(*((self.norm(x) if who == self.who else x) for who, x in (("q", q), ("k", k))))


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


@pytest.mark.parametrize(("axis", "named"), [(1, ACROSS), (2, TOKENS), (3, "")])
def test_the_axis_of_a_norm_is_read_through_the_rotation_after_it(axis, named):
    torch.manual_seed(0)
    report = examine(NormedOverAnotherAxis(axis), expects=Everything())
    assert [one.kind for one in report.findings] == (["wrong axis"] if named else [])
    assert f"normalized over {named}" in str(report.findings) or not named
