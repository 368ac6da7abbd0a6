"""A softmax that a layer writes out of exponentials is followed as torch.softmax is, also of scores of single tokens."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
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


def multiply_by_inverse(scores: Tensor, dim: int) -> Tensor:
    e = scores.exp()
    return e * (1 / e.sum(dim, keepdim=True))


def multiply_reciprocal_by_shifted(scores: Tensor, dim: int) -> Tensor:
    e = torch.exp(scores - scores.amax(dim, keepdim=True))
    return torch.mul(e.sum(dim, keepdim=True).add(1e-300).reciprocal(), e)


def shift_twice(scores: Tensor, dim: int) -> Tensor:
    return torch.exp(scores - scores.max()) / torch.exp(scores - scores.max()).sum(dim, keepdim=True)


def subtract_logarithm(scores: Tensor, dim: int) -> Tensor:
    return torch.exp(scores - scores.logsumexp(dim, keepdim=True))


def subtract_logarithm_of_last(scores: Tensor, dim: int) -> Tensor:
    return torch.exp(scores - torch.logsumexp(scores, dim=dim).unsqueeze(dim))


def subtract_logarithm_of_sums(scores: Tensor, dim: int) -> Tensor:
    shifted = scores - scores.amax(dim, keepdim=True)
    return (shifted - shifted.exp().sum(dim, keepdim=True).log()).exp()


def hide_none(scores: Tensor, dim: int) -> Tensor:
    e = scores.exp() * torch.ones(scores.shape[1:])
    return e / (e.sum(dim, keepdim=True) + 1e-300)


def hide_none_in_place(scores: Tensor, dim: int) -> Tensor:
    e = scores.exp()
    e *= torch.ones(scores.shape[1:])
    return e / e.sum(dim, keepdim=True)


def fill_none(scores: Tensor, dim: int) -> Tensor:
    e = scores.exp().masked_fill(torch.zeros(scores.shape[1:]).bool(), 0)
    return e / e.sum(dim, keepdim=True)


def divide_by_norm(scores: Tensor, dim: int) -> Tensor:
    return F.normalize(scores.exp(), p=1, dim=dim)


def divide_by_norm_of_shifted(scores: Tensor, dim: int) -> Tensor:
    return F.normalize(torch.exp(scores - scores.amax(dim, keepdim=True)), 1.0, dim)


SOFTMAXES = [
    *(divide_by_sums, divide_shifted, divide_shifted_in_place, exponentiate_twice, divide_by_sums_and_a_number),
    *(multiply_by_inverse, multiply_reciprocal_by_shifted, shift_twice, hide_none, hide_none_in_place, fill_none),
    *(subtract_logarithm, subtract_logarithm_of_last, subtract_logarithm_of_sums),
    *(divide_by_norm, divide_by_norm_of_shifted),
]


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


class Squares(nn.Module):
    """A square matrix of weights that tokens predict, whose sums have lost their axis."""

    def __init__(self, divide: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.score, self.divide = nn.Linear(C, T), divide

    def forward(self, x: Tensor) -> Tensor:
        self.weights = self.divide(self.score(x).exp()).detach()
        return self.divide(self.score(x).exp()) @ x


SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "of columns": lambda e: (e / e.sum(0)).mT,
    "of rows": lambda e: (e.mT / e.sum(1)).mT,
    "of the transposed": lambda e: (e.mT / e.mT.sum(0)).mT,
    "of logarithms": lambda e: (s := e.log()).sub(s.logsumexp(0)).exp().mT,
}


@pytest.mark.parametrize("divide", SQUARES)
def test_the_sums_of_a_square_matrix_are_along_the_axis_that_they_state(divide):
    part = Squares(SQUARES[divide])
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(T, C)))
    torch.testing.assert_close(part.weights.sum(-1), torch.ones(T))
    torch.testing.assert_close(recording.map(0).dense()[0, 0], part.weights, rtol=0, atol=EQUAL)


def test_a_division_by_the_sums_of_the_other_axis_is_no_softmax():
    recording, _ = record_and_compare(nn.Sequential(Squares(lambda e: e / e.sum(1))), lambda m: m(torch.randn(T, C)))
    assert not recording.calls


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


class Pooling(nn.Module):
    """A layer scores the tokens, and the softmax of the scores weighs them."""

    def __init__(self, softmax: Callable[[Tensor, int], Tensor], is_product: bool) -> None:
        super().__init__()
        self.softmax, self.is_product, self.score = softmax, is_product, nn.Linear(C, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.softmax(self.score(x), 1)
        return weights.mT @ x if self.is_product else (weights * x).sum(1)


@pytest.mark.parametrize("is_product", [True, False])
@pytest.mark.parametrize("softmax", [torch.softmax, *SOFTMAXES])
def test_attention_pooling_by_exponentials_has_the_weights_of_a_softmax(softmax, is_product):
    model, x = Pooling(softmax, is_product), torch.randn(B, T, C)
    recording, _ = record_and_compare(model, lambda m: m(x))
    (found,) = recording.other_weights
    torch.testing.assert_close(found.weights.reshape(B, T), model.score(x).softmax(1).squeeze(-1).detach(), rtol=0, atol=EQUAL)
    assert not recording.calls


class WithoutAttention(nn.Module):
    """Pooling, experts, gates of channels, classes, and chains of matrices, none of which attends with a softmax either."""

    def __init__(self, style: str, softmax: Softmax) -> None:
        super().__init__()
        self.style, self.softmax = style, softmax
        self.score, self.route, self.matrices = nn.Linear(C, 1), nn.Linear(C, SLOTS), nn.Linear(C, 3 * T)
        self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(SLOTS))

    def forward(self, x: Tensor) -> Tensor:
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
@pytest.mark.parametrize("style", ["experts", "channels", "classes", "a chain", "a chain, last first"])
def test_what_is_no_attention_with_a_softmax_is_none_with_its_exponentials(style, softmax):
    recording, _ = record_and_compare(nn.Sequential(WithoutAttention(style, softmax)), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls
