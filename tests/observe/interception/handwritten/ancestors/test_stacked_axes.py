"""Tokens that a module joins are pooled as others are; an axis along which outputs of layers were stacked is none of tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, LAYERS, ROWS = 3, 7, 8, 5, 2


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(C, C) for _ in range(LAYERS - 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).tanh())
        return states


class Mix(nn.Module):
    """Mixes of the outputs of layers: ELMo's has one learned number for each layer. https://arxiv.org/abs/1802.05365"""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.layers, self.score, self.router = style, Layers(), nn.Linear(C, 1), nn.Linear(C, LAYERS)
        self.learned, self.rows = nn.Parameter(torch.randn(LAYERS)), nn.Parameter(torch.randn(ROWS, LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.style)(self.layers(x))

    def tensordot(self, states: list[Tensor]) -> Tensor:
        return torch.tensordot(self.learned.softmax(0), torch.stack(states), 1)

    def tensordot_along_the_last_axis(self, states: list[Tensor]) -> Tensor:
        return torch.tensordot(torch.stack(states, -1), self.learned.softmax(0), dims=([3], [0]))

    def einsum(self, states: list[Tensor]) -> Tensor:
        return torch.einsum("l,lbtc->btc", self.learned.softmax(0), torch.stack(states))

    def sums(self, states: list[Tensor]) -> Tensor:
        return (self.learned.softmax(0).view(-1, 1, 1, 1) * torch.stack(states)).sum(0)

    def rows_by_tensordot(self, states: list[Tensor]) -> Tensor:
        return torch.tensordot(self.rows.softmax(-1), torch.stack(states), 1)

    def rows_by_matmul(self, states: list[Tensor]) -> Tensor:
        return self.rows.softmax(-1) @ torch.stack(states).flatten(1)

    def rows_by_sums(self, states: list[Tensor]) -> Tensor:
        return (self.rows.softmax(-1).view(ROWS, LAYERS, 1, 1, 1) * torch.stack(states)).sum(1)

    def rows_of_joined_states(self, states: list[Tensor]) -> Tensor:
        return self.rows.softmax(-1) @ torch.cat(states).view(LAYERS, -1)

    def scored_layers(self, states: list[Tensor]) -> Tensor:
        joined = torch.stack(states, 2)
        return (self.score(joined).softmax(2) * joined).sum(2)

    def scored_means(self, states: list[Tensor]) -> Tensor:
        joined = torch.stack([state.mean(1) for state in states], 1)
        return (self.score(joined).softmax(1) * joined).sum(1)

    def scored_means_of_joined_states(self, states: list[Tensor]) -> Tensor:
        joined = torch.stack(states, 1).mean(2)
        return (self.score(joined).softmax(1) * joined).sum(1)

    def scored_largest_of_joined_states(self, states: list[Tensor]) -> Tensor:
        joined = torch.stack(states, 1).amax(dim=-2, keepdim=True)
        return (self.score(joined).softmax(1) * joined).sum(1)

    def scored_first_tokens(self, states: list[Tensor]) -> Tensor:
        joined = torch.cat([state[:, :1] for state in states], 1)
        return (self.score(joined).softmax(1) * joined).sum(1)

    def scored_means_written_one_by_one(self, states: list[Tensor]) -> Tensor:
        joined = torch.zeros(B, LAYERS, C)
        for n, state in enumerate(states):
            joined[:, n] = state.mean(1)
        return (self.score(joined).softmax(1) * joined).sum(1)

    def routed(self, states: list[Tensor]) -> Tensor:
        return torch.einsum("btl,btlc->btc", F.softmax(self.router(states[0]), -1), torch.stack(states, 2))


class ScoredRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(C, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(1) * x).sum(1)


class MixInAnotherModule(nn.Module):
    """The outputs of layers are stacked in one module and mixed in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm, self.pool = Layers(), nn.LayerNorm(C), ScoredRows()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.norm(torch.stack([state.mean(1) for state in self.layers(x)], 1)))


MIXES = [name for name in vars(Mix) if name != "forward" and not name.startswith("_")]


@pytest.mark.parametrize("model", [*map(Mix, MIXES), MixInAnotherModule()], ids=[*MIXES, "in another module"])
def test_mixes_of_the_outputs_of_layers_are_no_attention(model):
    with regard.record(model.double()) as recording:
        model(torch.randn(B, T, C))
    assert not recording.calls
    assert not recording.missed
