"""Positions that are the same for all tokens of a whole model are found."""

import pytest
import torch
from torch import nn

import regard
from examination.wrong_calls import C, Rotary
from regard import Causal, Everything

SIZE = 40  # of the vocabulary


class Model(nn.Module):
    """Two layers of attention, with or without rotary positions, and a table of positions."""

    def __init__(self, places, angles=torch.zeros_like, is_causal=True, has_table=True):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.head = nn.Embedding(SIZE, C), nn.Linear(C, SIZE)
        self.wpe = nn.Embedding(64, C) if has_table else None
        self.blocks = nn.ModuleList(Layer(angles, is_causal) for _ in range(2))
        self.places = places

    def forward(self, ids):
        x = self.token(ids)
        x = x if self.wpe is None or self.places is None else x + self.wpe(self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Layer(Rotary):
    def __init__(self, angles, is_causal):
        super().__init__()
        self.change, self.is_causal = angles, is_causal
        if angles is None:
            del self.inv_freq

    def place(self, q, k):
        return (q, k) if self.change is None else super().place(q, k)

    def angles(self, t):
        return self.change(torch.arange(t))[:, None] * self.inv_freq

    def attend(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


def keep(positions):
    return positions


def kinds(report):
    return [one.kind for one in report.findings]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda **told: Model(torch.zeros_like, None, **told), "wpe.weight"),
        (lambda **told: Model(None, torch.zeros_like, has_table=False, **told), "blocks.0.inv_freq"),
    ],
)
def test_positions_that_are_all_zero_are_found(model, name, is_causal):
    report = regard.examine(model(is_causal=is_causal), expects=Causal() if is_causal else Everything())
    assert kinds(report) == ["wrong positions"], str(report)
    assert f"does not change the context of token 7 in blocks.0, though {name} is used" in report.findings[0].evidence


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    "model",
    [
        lambda **told: Model(keep, None, **told),
        lambda **told: Model(None, keep, has_table=False, **told),
        lambda **told: Model(None, None, has_table=False, **told),
        lambda **told: Model(torch.zeros_like, keep, **told),
    ],
)
def test_positions_of_each_token_or_none_at_all_are_no_finding(model, is_causal):
    report = regard.examine(model(is_causal=is_causal), expects=Causal() if is_causal else Everything())
    assert not report.findings, str(report)


def test_positions_that_nothing_uses_or_that_are_untrained_are_no_finding():
    report = regard.examine(Model(None, None))
    assert not report.findings
    assert any("though there is wpe.weight" in one.what for one in report.unknown)
    model = Model(torch.zeros_like, None)
    nn.init.zeros_(model.wpe.weight)
    assert not regard.examine(model).findings
