"""Columns that positions change, but do not rotate, are found; and rotations that are written to other columns are read."""

import math

import pytest
import torch
from torch import nn

from examination.wrong_calls import C, D, H, Rotary, turn_halves, turn_neighbors
from regard import examine
from regard.examination.call_reading.rotary_reading import read_rotary


def examine_new(made, residual=False):
    torch.manual_seed(0)
    layer = made()
    return examine(Residual(layer) if residual else layer)


class Residual(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + self.layer(x)


class Changed(Rotary):
    """Queries and keys (b, h, t, d) that `change` changes by their angles (t, d / 2)."""

    def place(self, q, k):
        angles = self.angles(q.shape[2]).to(q.dtype)
        return self.change(q, angles), self.change(k, angles)


def make_pairs(seed=3):
    """Queries (b, h, t, d), and the angles of their tokens (t, d / 2)."""
    x = torch.randn(2, 3, 7, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.arange(7.0)[:, None] * 0.3 ** torch.arange(5)


class WrittenAsHalves(Changed):
    """Neighboring columns as pairs, written to columns i and i + d / 2, as in DeepSeek."""

    def change(self, x, angles):
        y = turn_neighbors(x, angles.cos(), angles.sin())
        return torch.cat((y[..., ::2], y[..., 1::2]), -1)


def test_pairs_that_are_written_to_other_columns_are_read():
    x, angles = make_pairs()
    rotary = read_rotary(x, WrittenAsHalves.change(None, x, angles))
    assert rotary.columns == "neighboring columns, written to columns i and i + d / 2"
    assert torch.allclose(rotary.phasors, torch.polar(torch.ones_like(angles), angles).to(rotary.phasors))
    report = examine_new(WrittenAsHalves)
    assert report, str(report)
    assert any("written to columns i and i + d / 2" in one.what for one in report.checked)


class ByHead(Changed):
    """Rotated before the transpose, along the axis of heads."""

    def __init__(self):
        super().__init__()
        del self.inv_freq

    def angles(self, t):
        return torch.arange(t)[:, None] * 0.3 ** torch.arange(3)

    def change(self, x, angles):
        angles = self.angles(x.shape[1]).to(x.dtype)
        return turn_halves(x.transpose(1, 2), angles.cos(), angles.sin()).transpose(1, 2)


class OfPadded(ByHead):
    """Positions that begin later where a sequence is padded on the left: other angles in each sequence, and for each token."""

    def change(self, x, angles):
        angles = (torch.arange(x.shape[2]) - torch.arange(len(x))[:, None])[:, None, :, None] * 0.3 ** torch.arange(3)
        return turn_halves(x, angles.cos(), angles.sin())


@pytest.mark.slow
@pytest.mark.parametrize("residual", [False, True])
def test_positions_of_their_own_in_each_sequence_are_no_finding(residual):
    assert not examine_new(OfPadded, residual).findings


class BeforeSplit(nn.Module):
    """Queries and keys (b, t, h d) that `change` rotates before they are split into heads; keys may be grouped."""

    def __init__(self, change, groups=H, is_fused=False):
        super().__init__()
        self.change, self.groups, self.is_fused = change, groups, is_fused
        self.widths = [H * D, groups * D, groups * D]
        if is_fused:
            self.qkv = nn.Linear(C, sum(self.widths))
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, width) for width in self.widths)
        self.o_proj = nn.Linear(H * D, C)

    def forward(self, x):
        q, k, v = self.qkv(x).split(self.widths, -1) if self.is_fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k = (self.change(one, self.angles(one)) for one in (q, k))
        q, k, v = (one.unflatten(-1, (-1, D)).transpose(1, 2) for one in (q, k, v))
        k, v = (one.repeat_interleave(H // self.groups, 1) for one in (k, v))
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(context.transpose(1, 2).flatten(2))

    def angles(self, x):
        return (torch.arange(x.shape[1])[:, None] * 100.0 ** (-torch.arange(0, x.shape[2], 2) / x.shape[2])).to(x.dtype)


def turn_wide_halves(x, angles):
    return turn_halves(x, angles.cos(), angles.sin())


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"is_fused": True}, {"groups": 2}])
def test_pairs_of_columns_in_different_heads_are_found(form):
    finding = examine_new(lambda: BeforeSplit(turn_wide_halves, **form)).findings[0]
    assert finding.kind == "wrong positions"
    assert "queries are rotated before they are split into heads: the two columns of a pair lie in" in finding.evidence


@pytest.mark.parametrize(("times", "is_right"), [(4, True), (32, True), (None, False)])
def test_the_attention_factor_of_yarn_is_no_wrong_scale(times, is_right):
    """0.1 ln(s) + 1 on rotated queries and keys, for a context s times as long; another factor is none."""
    factor = 1.2 if times is None else 0.1 * math.log(times) + 1

    class Scaled(Rotary):
        def place(self, q, k):
            q, k = super().place(q, k)
            return q * factor, k * factor

    torch.manual_seed(0)
    report = examine(Scaled())
    assert [one.kind for one in report.findings] == ([] if is_right else ["wrong scale"])
    assert any(f"a context {times} times as long" in one.what for one in report.checked) == is_right
