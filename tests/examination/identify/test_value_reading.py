"""Weights of linear attention are read by its values, and nothing else is taken for a weighted sum."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from examination.subjects import case_of
from regard import Everything

C, H = 12, 3
D = C // H


class Linear(nn.Module):
    """Linear attention: features of queries times features of keys, and their products with the values are summed first."""

    def __init__(self, scale=D**-0.5):
        super().__init__()
        torch.manual_seed(1)
        self.to_q, self.to_kv, self.to_out = (nn.Linear(C, n * C, bias=False) for n in (1, 2, 1))
        self.factor = scale

    def features(self, x):
        return F.elu(x) + 1

    def normalize(self, context, q, k):
        return context / torch.einsum("bhtd,bhsd->bht", q, k).clamp_min(1e-30).unsqueeze(-1)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in (self.to_q(x), *self.to_kv(x).chunk(2, -1)))
        q, k = self.features(q * self.factor), self.features(k)
        states = torch.einsum("bhtd,bhte->bhde", k, v)
        return self.to_out(self.normalize(q @ states, q, k).transpose(1, 2).flatten(2))


class Taylor(Linear):
    """1 + s + s² / 2 of the scores s, as features."""

    def features(self, x):
        square = torch.einsum("...d,...e->...de", x, x).flatten(-2) / 2**0.5
        return torch.cat([torch.ones_like(x[..., :1]), x, square], -1)


class Unnormalized(Linear):
    def normalize(self, context, q, k):
        return context


def read(layer):
    return case_of(layer, Everything()).weights_by_values


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Linear, Unnormalized])
def test_linear_attention_without_scores_leaves_the_scale_untold(layer):
    report = regard.examine(layer(), expects=Everything())
    assert report.is_inconclusive, str(report)
    whats = [one.what for one in report.missing]
    assert any("do not follow q kᵀ, as in linear attention" in one for one in whats)
    assert any("rows" in one for one in whats) == (layer is Unnormalized)


@pytest.mark.slow
def test_the_scale_of_a_taylor_series_is_read_by_the_values():
    report = regard.examine(Taylor(), expects=Everything())
    assert report, str(report)
    wrong = regard.examine(Taylor(1.0), expects=Everything())
    assert wrong.findings[0].kind == "wrong scale", str(wrong)
