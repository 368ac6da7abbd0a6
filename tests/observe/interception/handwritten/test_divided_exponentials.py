"""A softmax that a layer writes out of exponentials is followed as torch.softmax is, also of scores of single tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D, SLOTS = 2, 7, 11, 5, 3
Softmax = Callable[[Tensor, int], Tensor]


def divide_by_sums(scores: Tensor, dim: int) -> Tensor:
    e = scores.exp()
    return e / e.sum(dim, keepdim=True)


def divide_shifted(scores: Tensor, dim: int) -> Tensor:
    e = torch.exp(scores - scores.max(dim, keepdim=True).values)
    return e / e.sum(dim).unsqueeze(dim)


def divide_shifted_in_place(scores: Tensor, dim: int) -> Tensor:
    e = scores.sub(scores.detach().amax(dim, keepdim=True)).exp_()
    return e / e.sum(dim, keepdim=True).clamp(min=1e-9)


def exponentiate_twice(scores: Tensor, dim: int) -> Tensor:
    return torch.div(torch.exp(scores), torch.exp(scores).sum(axis=dim, keepdims=True))


def divide_by_sums_and_a_number(scores: Tensor, dim: int) -> Tensor:
    e = scores.exp()
    return e / (1e-300 + e.sum(dim, keepdim=True))


SOFTMAXES = [divide_by_sums, divide_shifted, divide_shifted_in_place, exponentiate_twice, divide_by_sums_and_a_number]


class Predicted(nn.Module):
    """Weights that each token predicts without keys, of places or of slots that read all tokens."""

    def __init__(self, softmax: Softmax, width: int, dim: int) -> None:
        super().__init__()
        self.score, self.value, self.softmax, self.dim = nn.Linear(C, width), nn.Linear(C, D), softmax, dim

    def forward(self, x: Tensor) -> Tensor:
        weights = self.softmax(self.score(x), self.dim)
        self.weights = (weights if self.dim == -1 else weights.mT).detach()
        return (weights if self.dim == -1 else weights.mT) @ self.value(x)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize(("width", "dim"), [(T, -1), (SLOTS, 1)])
def test_weights_that_tokens_predict_are_recorded_as_they_are(softmax, width, dim):
    part = Predicted(softmax, width, dim)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0).dense()[:, 0], part.weights, rtol=0, atol=EQUAL)


class KernelRegression(nn.Module):
    """Averages of the values of points by their distances, each a single number."""

    def forward(self, points: Tensor, values: Tensor, queries: Tensor) -> Tensor:
        kernel = torch.exp(-((points.reshape(-1, 1) - queries.reshape(1, -1)) ** 2) / 2)
        self.weights = kernel / kernel.sum(0)
        return values @ self.weights


def test_the_distances_of_single_numbers_are_scores():
    part = KernelRegression()
    recording, _ = record_and_compare(part, lambda m: m(torch.randn(T), torch.randn(T), torch.randn(D)))
    torch.testing.assert_close(recording.map(0).dense()[0, 0], part.weights.mT, rtol=0, atol=EQUAL)


class LinearAttention(nn.Module):
    def __init__(self, softmax: Softmax) -> None:
        super().__init__()
        self.one, self.two, self.three, self.softmax = nn.Linear(C, D), nn.Linear(C, D), nn.Linear(C, C), softmax

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.one(x), -1) @ (self.two(x).mT @ self.three(x))


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_queries_may_be_such_a_softmax_over_features(softmax):
    recording, output = record_and_compare(LinearAttention(softmax), lambda m: m(torch.randn(B, T, C)))
    (call,) = recording.calls
    torch.testing.assert_close((call.map.dense() @ call.map.values)[:, 0], output, rtol=0, atol=EQUAL)


class WithoutAttention(nn.Module):
    """Pooling, experts, gates of channels, classes, and chains of matrices, none of which attends with a softmax either."""

    def __init__(self, style: str, softmax: Softmax) -> None:
        super().__init__()
        self.style, self.softmax = style, softmax
        self.score, self.route, self.matrices = nn.Linear(C, 1), nn.Linear(C, SLOTS), nn.Linear(C, 3 * T)
        self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(SLOTS))

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "pooling":
            weights = self.softmax(self.score(x), 1)
            return weights.mT @ x, (weights * x).sum(1)
        if self.style == "experts":
            gates = self.softmax(self.route(x), -1)
            return torch.einsum("bte,btec->btc", gates, torch.stack([expert(x) for expert in self.experts], -2))
        if self.style == "channels":
            return x * self.softmax(x.mean(1, keepdim=True), -1)
        if self.style == "classes":
            return self.softmax(self.route(x), -1) @ torch.arange(float(SLOTS))
        one, two, three = (self.softmax(part, -1) for part in self.matrices(x).chunk(3, -1))
        return (one @ two) @ three if self.style == "a chain" else one @ (two @ three)


@pytest.mark.parametrize("softmax", [torch.softmax, *SOFTMAXES])
@pytest.mark.parametrize("style", ["pooling", "experts", "channels", "classes", "a chain", "a chain, last first"])
def test_what_is_no_attention_with_a_softmax_is_none_with_its_exponentials(style, softmax):
    recording, _ = record_and_compare(nn.Sequential(WithoutAttention(style, softmax)), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls
