"""Tokens that a module joins are pooled as others are; an axis along which outputs of layers were stacked is none of tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, LAYERS, ROWS = 3, 7, 8, 5, 2


class JoinedTokens(nn.Module):
    """Attention pooling of tokens that the module itself joins; `weights` are those of the last forward, (b, h, 1, t)."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.weights, self.score, self.cell = style, torch.zeros(0), nn.Linear(C, 1), nn.GRUCell(C, C)
        self.one, self.other, self.first = nn.Linear(C, C), nn.Linear(C, C), nn.Parameter(torch.randn(1, 1, C))

    def join(self, x: Tensor) -> Tensor:
        if self.style == "two sequences":
            return torch.cat([x, 2 * x.flip(1)], 1)
        if self.style == "two layers of the tokens":
            return torch.cat([self.one(x), self.other(x)], 1)
        if self.style == "a learned token and others":
            return torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        if self.style == "means of two layers":
            return torch.stack([self.one(x), self.other(x)], 1).mean(1)
        if self.style == "states of a loop":
            states = [x.new_zeros(len(x), C)]
            for token in x.unbind(1):
                states.append(self.cell(token, states[-1]))
            return torch.stack(states[1:], 1)
        if self.style == "tokens one by one":
            return torch.stack([self.one(x[:, n]) for n in range(T)], 1)
        if self.style == "tokens one by one, kept as sequences":
            return torch.cat([self.one(token) for token in x.split(1, 1)], 1)
        if self.style == "tokens written one by one":
            joined = torch.zeros_like(x)
            for n in range(T):
                joined[:, n] = self.one(x[:, n])
            return joined
        assert self.style == "a learned token and picked ones"
        return torch.stack([self.first[0].expand(len(x), -1), *x.unbind(1)], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x)
        weights = self.score(x.tanh()).softmax(1)
        self.weights = weights.detach().mT.unsqueeze(1)
        return (weights * x).sum(1)


@pytest.mark.parametrize(
    "style",
    [
        *("two sequences", "two layers of the tokens", "a learned token and others", "states of a loop"),
        *("tokens one by one", "tokens one by one, kept as sequences", "a learned token and picked ones"),
        "tokens written one by one",
        "means of two layers",
    ],
)
def test_joined_tokens_are_pooled(style):
    model = JoinedTokens(style)
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    (call,) = recording.calls
    torch.testing.assert_close(call.map.dense(), model.weights, rtol=0, atol=EQUAL)


class Bag(nn.Module):
    """A tensordot pools the instances of one bag, which are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(C, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.weights = self.score(x).squeeze(-1).softmax(0)
        return torch.tensordot(self.weights, x, 1)


class JoinedBag(nn.Module):
    """Instances of a bag that an index picks, joined with others."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(C, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[torch.arange(T).flip(0)[:2]], x[:3]])
        self.weights = self.score(x).softmax(0)
        return (self.weights * x).sum(0)


def test_joined_instances_of_a_bag_are_pooled():
    recording, _ = record_and_compare(model := JoinedBag(), lambda m: m(torch.randn(T, C)))
    torch.testing.assert_close(recording.map(0).dense()[0, 0, 0], model.weights.detach()[:, 0], rtol=0, atol=EQUAL)


def test_a_tensordot_pools_tokens():
    recording, _ = record_and_compare(model := Bag(), lambda m: m(torch.randn(T, C)))
    torch.testing.assert_close(recording.map(0).dense()[0, 0, 0], model.weights.detach(), rtol=0, atol=EQUAL)


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
