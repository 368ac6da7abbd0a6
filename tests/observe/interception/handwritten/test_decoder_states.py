"""Decoders whose state begins as zeros: the first step is a row of the map like any other."""

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

B, S, C, D, STEPS = 2, 5, 6, 8, 4


class Decoder(nn.Module):
    """Words of a sentence that a state predicts one by one, as of Bahdanau et al. https://arxiv.org/abs/1409.0473"""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.keys, self.query, self.line = nn.Linear(C, D), nn.Linear(C, D), nn.Linear(D, 1)
        self.cell, self.start, self.weights = nn.GRUCell(C, C), start, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        state = {"zeros": torch.zeros(len(x), C), "zeros_like": torch.zeros_like(x[:, 0]), "new_zeros": x.new_zeros(len(x), C)}[
            self.start
        ].to(x.dtype)
        rows, states = [], []
        for _ in range(STEPS):
            scores = self.line(torch.tanh(self.keys(x) + self.query(state).unsqueeze(1))).squeeze(-1)
            rows.append(scores.softmax(-1))
            state = self.cell(torch.bmm(rows[-1].unsqueeze(1), x).squeeze(1), state)
            states.append(state)
        self.weights = torch.stack(rows, 1).detach()
        return torch.stack(states, 1)


@pytest.mark.parametrize("start", ["zeros", "zeros_like", "new_zeros"])
def test_the_first_step_of_a_decoder_whose_state_is_zeros_is_recorded(start):
    decoder = Decoder(start).double()
    recording, _ = record_and_compare(nn.Sequential(decoder), lambda m: m(torch.randn(B, S, C, dtype=torch.float64)))
    assert len(recording.calls) == STEPS
    found = torch.cat([call.map.dense() for call in recording.calls], 2)
    torch.testing.assert_close(found.squeeze(1), decoder.weights, rtol=0, atol=EQUAL)


class DotDecoder(nn.Module):
    """Words that a state predicts one by one, with scores that are products. https://arxiv.org/abs/1508.04025"""

    def __init__(self, start: str) -> None:
        super().__init__()
        self.keys, self.cell, self.start, self.weights = nn.Linear(C, C), nn.GRUCell(C, C), start, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros_like(x[:, 0]) if self.start == "zeros_like" else torch.zeros(len(x), C)).to(x.dtype)
        keys, rows, states = self.keys(x), [], []
        for _ in range(STEPS):
            product = torch.bmm(keys, state.unsqueeze(2)).squeeze(2)
            scores = torch.einsum("bkd,bd->bk", keys, state) if self.start == "einsum" else product
            rows.append(scores.softmax(-1))
            state = self.cell(torch.bmm(rows[-1].unsqueeze(1), x).squeeze(1), state)
            states.append(state)
        self.weights = torch.stack(rows, 1).detach()
        return torch.stack(states, 1)


@pytest.mark.parametrize("start", ["zeros", "zeros_like", "einsum"])
def test_the_first_step_of_a_decoder_with_products_is_recorded(start):
    decoder = DotDecoder(start).double()
    recording, _ = record_and_compare(nn.Sequential(decoder), lambda m: m(torch.randn(B, S, C, dtype=torch.float64)))
    assert len(recording.calls) == STEPS
    torch.testing.assert_close(recording.map(0).dense().squeeze(1), decoder.weights, rtol=0, atol=EQUAL)


class Pooling(nn.Module):
    """Attention pooling: one row of weights by a learned vector of context."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.query, self.line = nn.Linear(C, D), nn.Linear(C, D), nn.Linear(D, 1)
        self.context = nn.Parameter(torch.zeros(1, C))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.line(torch.tanh(self.keys(x) + self.query(self.context).unsqueeze(1))).squeeze(-1)
        self.weights = scores.softmax(-1).unsqueeze(1)
        return torch.bmm(self.weights, x).squeeze(1)


class ZeroQuery(nn.Module):
    """Pooling by products with a learned vector that begins as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.context = nn.Linear(C, C), nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        self.weights = (self.keys(x) @ self.context).softmax(-1).unsqueeze(1)
        return torch.bmm(self.weights, x).squeeze(1)


@pytest.mark.parametrize("pooling", [Pooling, ZeroQuery])
def test_pooling_by_a_learned_vector_is_among_the_other_weights(pooling):
    model = pooling().double()
    recording, _ = record_and_compare(nn.Sequential(model), lambda m: m(torch.randn(B, S, C, dtype=torch.float64)))
    torch.testing.assert_close(recording.other_weights[0].weights, model.weights.detach(), rtol=0, atol=EQUAL)
