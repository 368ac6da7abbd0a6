"""A weight for each channel of each pair of tokens: the channels are heads; and other scores that are no product."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D, NEAR = 2, 7, 12, 4, 3
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda weights, values: torch.einsum("bqkc,bqkc->bqc", weights, values),
    "sum of a product": lambda weights, values: (weights * values).sum(2),
    "sum of a product, values first": lambda weights, values: torch.sum(values * weights, dim=-2),
}


class OfChannels(nn.Module):
    """Scores of each channel of each pair; `weights` are those of the last forward as its map has them."""

    def __init__(self, form: str, product: str) -> None:
        super().__init__()
        self.form, self.multiply = form, PRODUCTS[product]
        self.one, self.other, self.value, self.place = (nn.Linear(n, C) for n in (C, C, C, D))
        self.score = nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, C))

    def pick(self, x: Tensor, index: Tensor) -> Tensor:
        flat = index.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, flat).view(*index.shape, x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, points = self.one(x), self.other(x), self.value(x), x[..., :D]
        index = torch.cdist(points, points).topk(NEAR, largest=False).indices
        if self.form == "picked keys":  # in the order of the first public code of https://arxiv.org/abs/2012.09164
            places = self.place(points[:, :, None] - self.pick(points, index))
            s, value = query[:, :, None] - self.pick(key, index) + places, self.pick(value, index) + places
        elif self.form == "bounded sums":  # https://arxiv.org/abs/1709.04696
            s, value = 5 * torch.tanh((query[:, :, None] + key[:, None]) / 5), value[:, None]
        else:
            places = self.place(points[:, :, None] - points[:, None])
            s, value = query[:, :, None] - key[:, None] + places, value[:, None] + places
        if self.form == "picked pairs":
            pairs = index[..., None].expand(-1, -1, -1, C)
            s, value = s.gather(2, pairs), value.gather(2, pairs)
        weights = (s if self.form == "bounded sums" else self.score(s)).softmax(-2)
        self.weights = weights.detach().permute(0, 3, 1, 2)
        if self.form != "bounded sums":  # where each query has values of its own
            self.weights = weights.detach().flatten(0, 1).transpose(1, 2).unsqueeze(2)  # (b t, channels, 1, neighbors)
        return self.multiply(weights, value)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("form", ["all pairs", "bounded sums", "picked pairs", "picked keys"])
def test_a_weight_for_each_channel_is_recorded_with_the_channels_as_heads(form, product):
    part = OfChannels(form, product)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)


class Scores(nn.Module):
    """Positive numbers of pairs of tokens that are no product, divided by their sums or weights as they are."""

    def __init__(self, form: str, is_divided: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.line = nn.Linear(C, D), nn.Linear(C, D), nn.Linear(C, D), nn.Linear(D, 1)
        self.one, self.other, self.form, self.is_divided = nn.Linear(C, 1), nn.Linear(C, 1), form, is_divided

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x)
        if self.form == "of distances":
            e = torch.exp(-(torch.cdist(q, k) ** 2) / 2)
        elif self.form == "of a network":
            e = self.line(torch.tanh(q[:, :, None] + k[:, None])).squeeze(-1).exp()
        else:
            assert self.form == "of near tokens"
            e = F.leaky_relu(self.one(x) + self.other(x).mT).exp() * (torch.cdist(x, x) < C**0.5).double()
        weights = e / e.sum(-1, keepdim=True) if self.is_divided else e
        self.weights = weights.detach()
        return weights @ self.value(x)


@pytest.mark.parametrize("is_divided", [False, True])
@pytest.mark.parametrize("form", ["of distances", "of a network", "of near tokens"])
def test_exponentials_of_other_scores_are_weights_as_they_are_and_divided(form, is_divided):
    part = Scores(form, is_divided)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    maps = recording.map(0, kind="self" if is_divided else "implicit").dense()
    torch.testing.assert_close(maps[:, 0], part.weights, rtol=0, atol=EQUAL)
