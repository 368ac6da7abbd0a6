"""Scores that are no product, of two tokens or of a token and a place, whose exponentials are divided late or never."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D, STEPS, MIXTURES = 2, 7, 11, 5, 3, 4


class Exponentials(nn.Module):
    """Exponentials of scores that are no product, and what divides them, before or after the product with the values."""

    def __init__(self, score: str, divide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.key, self.value, self.line = nn.Linear(C, D), nn.Linear(C, D), nn.Linear(C, D), nn.Linear(D, 1)
        self.one, self.other, self.score, self.divide = nn.Linear(C, 1), nn.Linear(C, 1), score, divide
        self.register_buffer("edges", (torch.rand(T, T) > 0.3).double() + torch.eye(T))

    def exponentiate(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x)
        if self.score == "of distances":
            return torch.exp(-(torch.cdist(q, k) ** 2) / 2)
        if self.score == "of a network":
            return self.line(torch.tanh(q[:, :, None] + k[:, None])).squeeze(-1).exp()
        e = F.leaky_relu(self.one(x) + self.other(x).mT).exp()
        if self.score == "of near tokens":
            return e * (torch.cdist(x, x) < C**0.5).double()
        assert self.score == "of a number of each"
        return e * self.edges

    def forward(self, x: Tensor) -> Tensor:
        e = self.exponentiate(x)
        self.exponentials = e.detach()
        return self.divide(e, self.value(x))


SCORES = ["of distances", "of a network", "of a number of each", "of near tokens"]
DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "before": lambda e, v: (e / e.sum(-1, keepdim=True)) @ v,
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("when", DIVISIONS)
def test_weights_are_divided_by_their_sums_whenever_the_layer_divides(score, when):
    part = Exponentials(score, DIVISIONS[when])
    recording, output = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    (call,) = recording.calls
    expected = part.exponentials / part.exponentials.sum(-1, keepdim=True)
    torch.testing.assert_close(call.map.dense()[:, 0], expected, rtol=0, atol=EQUAL)
    torch.testing.assert_close((call.map.dense() @ call.map.values)[:, 0] if call.kind == "implicit" else output, output)


@pytest.mark.parametrize("score", SCORES)
def test_exponentials_that_are_never_divided_are_weights_as_they_are(score):
    part = Exponentials(score, torch.matmul)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    found = recording.map(0, kind="implicit").dense()[:, 0]
    torch.testing.assert_close(found, part.exponentials, rtol=0, atol=EQUAL)


class Window(nn.Module):
    """A mixture of windows that a decoder moves over the places of a text. https://arxiv.org/abs/1308.0850"""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor], is_normalized: bool) -> None:
        super().__init__()
        self.cell, self.parameters_of_window, self.weigh = nn.LSTMCell(C, C), nn.Linear(C, 3 * MIXTURES), weigh
        self.is_normalized = is_normalized

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.mean(1)
        places, moved, outputs, self.weights = torch.arange(T), torch.zeros(B, MIXTURES), [], []
        for step in range(STEPS):
            h, c = self.cell(x[:, step], (h, c))
            size, width, by = self.parameters_of_window(h).exp().chunk(3, -1)
            moved = moved + by
            windows = size.unsqueeze(2) * torch.exp(-width.unsqueeze(2) * (moved.unsqueeze(2) - places) ** 2)
            weights = windows.sum(1)
            weights = weights / weights.sum(-1, keepdim=True) if self.is_normalized else weights
            self.weights.append(weights.detach())
            outputs.append(self.weigh(weights, x))
        return torch.stack(outputs, 1)


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda w, x: torch.bmm(w.unsqueeze(1), x).squeeze(1),
    "einsum": lambda w, x: torch.einsum("bt,btc->bc", w, x),
    "sums": lambda w, x: (w.unsqueeze(-1) * x).sum(1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_normalized", [False, True])
def test_windows_over_places_are_recorded_at_each_step(way, is_normalized):
    part = Window(WAYS[way], is_normalized)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    assert {call.kind for call in recording.calls} == {"self" if is_normalized else "implicit"}
    for call, weights in zip(recording.calls, part.weights, strict=True):
        torch.testing.assert_close(call.map.dense()[:, 0, 0], weights, rtol=0, atol=EQUAL)


class Splat(nn.Module):
    """Tokens that are added up at the places of a grid, each by how near a number of it is."""

    def __init__(self, is_learned: bool) -> None:
        super().__init__()
        grid = torch.linspace(-1, 1, STEPS)
        self.place, self.grid = nn.Linear(C, 1), nn.Parameter(grid) if is_learned else nn.Buffer(grid)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.exp(-((self.place(x) - self.grid) ** 2))
        self.weights = weights.detach().mT
        return weights.mT @ x


@pytest.mark.parametrize("is_learned", [False, True])
def test_places_of_a_grid_are_queries_of_the_tokens_near_them(is_learned):
    part = Splat(is_learned)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0, kind="implicit").dense()[:, 0], part.weights, rtol=0, atol=EQUAL)


class ByChannel(nn.Module):
    """A softmax over the keys for each channel of the values, of bounded sums. https://arxiv.org/abs/1709.04696"""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(C, C), nn.Linear(C, C)

    def weigh(self, x: Tensor) -> Tensor:
        return (5 * torch.tanh((self.query(x)[:, :, None] + self.key(x)[:, None]) / 5)).softmax(2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weigh(x) * x[:, None]).sum(2)


def test_each_channel_is_a_head_of_weights_for_each_channel():
    part, x = ByChannel(), torch.randn(B, T, C)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(x))
    torch.testing.assert_close(recording.map(0).dense(), part.weigh(x).permute(0, 3, 1, 2), rtol=0, atol=EQUAL)


class WithoutAttention(nn.Module):
    """Exponentials of sums of tokens that weigh nothing along their places."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.mix = style, nn.Linear(MIXTURES, C)
        self.register_buffer("centers", torch.linspace(-1, 1, MIXTURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "radial features":
            return self.mix(torch.exp(-((x.norm(dim=-1, keepdim=True) - self.centers) ** 2))) * x
        if self.style == "a histogram":
            return torch.exp(-((x.unsqueeze(-1) - self.centers) ** 2)).sum(1)
        assert self.style == "decays"
        sums = x.cumsum(1)
        return torch.exp(sums.mean(-1)[:, :, None] - sums.mean(-1)[:, None]).tril().sum(-1)


@pytest.mark.parametrize("style", ["radial features", "a histogram", "decays"])
def test_other_exponentials_of_sums_are_no_attention(style):
    recording, _ = record_and_compare(nn.Sequential(WithoutAttention(style)), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


class Gates(nn.Module):
    """A gate of each channel of a neighbor. https://arxiv.org/abs/1711.07553"""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(C, D), nn.Linear(C, D), nn.Linear(C, D)

    def weigh(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.query(x)[:, :, None] + self.key(x)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return (self.weigh(x) * self.value(x)[:, None]).sum(2)


def test_gates_of_each_channel_of_a_pair_are_weights():
    part, x = Gates(), torch.randn(B, T, C)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(x))
    expected = part.weigh(x).permute(0, 3, 1, 2)
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), expected, rtol=0, atol=EQUAL)


def weigh_planes(maps: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return maps * (1 + torch.sigmoid(c.mean((2, 3), keepdim=True) + s[:, :1]))


def gate_tokens(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return (x * torch.sigmoid(one.mean(-1, keepdim=True) + other.mean(1, keepdim=True))).mT @ other


GATED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "channels and places, a mean": lambda x, c, s: weigh_planes(x, c, s).mean((2, 3)),  # https://arxiv.org/abs/1807.06514
    "channels and places, a sum": lambda x, c, s: weigh_planes(x, c, s).sum((2, 3)),
    "channels and places, a product": lambda x, c, s: torch.einsum(
        "bchw,bchw->bc", x, torch.sigmoid(c.mean((2, 3), keepdim=True) + s[:, :1])
    ),
    "rows and columns": lambda x, c, s: (x * torch.sigmoid(c.mean(3, keepdim=True) + s.mean(2, keepdim=True))).sum(3),
    "tokens beside their mean": lambda x, c, s: gate_tokens(*(one.flatten(2).mT for one in (x, c, s))),
}


class Gated(nn.Module):
    """A tensor (b, c, rows, columns) whose entries have a gate each, made from sums of two of its means."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.other, self.mix = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, self.one(x), self.other(x))


@pytest.mark.parametrize("mix", GATED)
def test_gates_of_entries_are_no_weights(mix):
    recording, _ = record_and_compare(nn.Sequential(Gated(GATED[mix])), lambda m: m(torch.randn(B, C, T, D)))
    assert not recording.calls
    assert not recording.missed
