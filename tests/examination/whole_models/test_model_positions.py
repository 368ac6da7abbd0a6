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


class LaterPositions(Model):
    """Positions that enter after the first layer, or before it with a gate that is 0 or near it at first."""

    def __init__(self, gate=None):
        super().__init__(keep, None)
        self.gate = None if gate is None else nn.Parameter(torch.tensor(gate))

    def forward(self, ids):
        x, positions = self.token(ids), self.wpe(torch.arange(ids.shape[1]))
        if self.gate is not None:
            x = x + self.gate.tanh() * positions
        for n, block in enumerate(self.blocks):
            x = x + block(x)
            if self.gate is None and n == 0:
                x = x + positions
        return self.head(x)


class GatedFrequencies(Model):
    """Sines of positions with a gate that is 0 at first."""

    def __init__(self):
        super().__init__(None, None, has_table=False)
        self.gate = nn.Parameter(torch.zeros(()))
        self.register_buffer("inv_freq", 100 ** (-torch.arange(0, C, 2) / C))

    def forward(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] * self.inv_freq
        x = self.token(ids) + self.gate * torch.cat((angles.sin(), angles.cos()), -1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("model", [LaterPositions, lambda: LaterPositions(0.0), lambda: LaterPositions(1e-6), GatedFrequencies])
def test_positions_that_enter_later_or_behind_a_gate_of_zero_cannot_be_determined(model):
    report = regard.examine(model())
    assert not report.findings, str(report)
    assert any("whether the order of tokens should matter" in one.what for one in report.unknown)


class ByIds(Model):
    """The rows of the table of positions are those of token ids."""

    def forward(self, ids):
        x = self.token(ids) + self.wpe(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_positions_that_are_looked_up_with_token_ids_are_named():
    (finding,) = regard.examine(ByIds(None, angles=None)).findings
    assert finding.kind == "wrong positions"
    assert finding.evidence.endswith("wpe.weight is looked up with token ids, not with their places")
