"""Norms of queries and keys after their rotation are found where scores of the same tokens change with a common shift."""

import pytest
import torch
from torch import nn

from examination.wrong_calls import D, Rotary, T
from regard import examine
from regard.examination.call_checks.position_checks import check_positions
from regard.examination.call_reading.inner_calls import record_inner_calls
from regard.examination.report import Finding

H, LONG = 3, 9


class Normed(Rotary):
    """Weights of a norm, before or after the rotation."""

    def __init__(self, make, is_late):
        super().__init__()
        self.q_norm, self.k_norm, self.is_late = make(D), make(D), is_late
        for one in (self.q_norm, self.k_norm):
            nn.init.normal_(one.weight, 1, 0.3)

    def place(self, q, k):
        if not self.is_late:
            return super().place(self.q_norm(q), self.k_norm(k))
        q, k = super().place(q, k)
        return self.q_norm(q), self.k_norm(k)


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_before_the_rotation_is_right(make):
    torch.manual_seed(1)
    report = examine(Normed(make, is_late=False))
    assert report, str(report)
    assert not any("come before" in one.what for one in report.unknown)


class OneSided(Rotary):
    """Queries are rotated and then normalized by their size; keys are normalized too, and rotated or not."""

    def __init__(self, who, is_other_rotated, is_other_normed):
        super().__init__()
        self.q_norm, self.k_norm = (nn.RMSNorm(D, elementwise_affine=False) for _ in range(2))
        self.who, self.is_other_rotated, self.is_other_normed = who, is_other_rotated, is_other_normed

    def place(self, q, k):
        q, k = (q, k) if self.who == "queries" else (k, q)
        norm, other = (self.q_norm, self.k_norm) if self.who == "queries" else (self.k_norm, self.q_norm)
        rotated, turned = super().place(q, k)
        first, second = norm(rotated), turned if self.is_other_rotated else k
        second = other(second) if self.is_other_normed else second
        return (first, second) if self.who == "queries" else (second, first)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["queries", "keys"])
@pytest.mark.parametrize("is_other_normed", [False, True])
def test_one_side_that_is_rotated_before_its_norm_is_named(who, is_other_normed):
    torch.manual_seed(1)
    layer = OneSided(who, False, is_other_normed)
    (finding, *_) = examine(layer).findings
    assert finding.kind == "wrong positions"
    calls = record_inner_calls(layer, lambda: layer(torch.randn(2, T, H * 8))).calls
    wrong = check_positions(calls)
    assert isinstance(wrong, Finding)
    assert f"only {who} are rotated by their positions" in wrong.evidence


@pytest.mark.slow
@pytest.mark.parametrize("who", ["queries", "keys"])
@pytest.mark.parametrize("is_other_normed", [False, True])
def test_both_sides_rotated_are_right_if_one_is_normalized_after(who, is_other_normed):
    torch.manual_seed(1)
    report = examine(OneSided(who, True, is_other_normed))
    assert not report.findings, str(report)
