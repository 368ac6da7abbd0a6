"""A row of weights that was predicted from other tokens than it multiplies reads these; one that was made of them pools."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D, STEPS = 2, 7, 11, 5, 3

Weigh = Callable[[Tensor, Tensor], Tensor]
WAYS: dict[str, Weigh] = {
    "bmm": lambda w, v: torch.bmm(w.unsqueeze(1), v).squeeze(1),
    "einsum": lambda w, v: torch.einsum("bt,btc->bc", w, v),
    "sums": lambda w, v: (w.unsqueeze(-1) * v).sum(1),
}


class Step(nn.Module):
    """A decoder that reads places of its encoder's outputs: tutorials of translation in PyTorch had it in 2017."""

    def __init__(self, weigh: Weigh, projects: bool = False) -> None:
        super().__init__()
        self.attn, self.combine, self.cell, self.weigh = nn.Linear(2 * C, T), nn.Linear(2 * C, C), nn.GRUCell(C, C), weigh
        self.project = nn.Linear(C, C) if projects else nn.Identity()

    def forward(self, word: Tensor, state: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.softmax(self.attn(torch.cat((word, state), 1)), dim=1)
        read = self.weigh(weights, self.project(encoded))
        return self.cell(F.relu(self.combine(torch.cat((word, read), 1))), state), weights


class Translator(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(C, C, batch_first=True), step

    def forward(self, x: Tensor) -> Tensor:
        encoded, state = self.encoder(x)
        state, weights = state[0], []
        for step in range(STEPS):
            state, found = self.decoder(x[:, step], state, encoded)
            weights.append(found)
        return torch.stack(weights, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("projects", [False, True])
def test_weights_of_places_that_a_decoder_predicts_are_recorded_at_each_step(way, projects):
    model = Translator(Step(WAYS[way], projects))
    recording, weights = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert {call.name for call in recording.calls} == {"decoder"}
    found = torch.cat([call.map.dense()[:, 0] for call in recording.calls], 1)
    torch.testing.assert_close(found, weights, rtol=0, atol=EQUAL)


class WithoutAttention(nn.Module):
    """Rows of weights that pool the tensor that they were made of, or that choose among outputs of layers."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.score, self.gate = style, nn.Linear(C, 1), nn.Linear(C, 3)
        self.layers = nn.ModuleList(nn.Linear(C, D) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.style == "pooling":
            return (self.score(x).softmax(1) * x).sum(1) + self.score(y).softmax(1).mT @ y
        branches = torch.stack([layer(x.mean(1)) for layer in self.layers], 1)
        return self.gate(y.mean(1)).softmax(-1).unsqueeze(1) @ branches


@pytest.mark.parametrize("style", ["pooling", "experts that another input chooses"])
def test_a_row_that_pools_or_routes_is_no_attention(style):
    run = lambda m: m(torch.randn(B, T, C), torch.randn(B, T, C))  # noqa: E731
    recording, _ = record_and_compare(WithoutAttention(style), run)
    assert not recording.calls
