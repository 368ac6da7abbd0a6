"""Attention pooling is one row of weights for all tokens, whose query is what the layer that scores them has learned."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL, record_and_compare
from regard.observe.attention_changes import CutEdges

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, H = 3, 7, 8, 2


class Pooling(nn.Module):
    """Poolings as published and as people write them; `weights` are those of the last forward, (b, h, 1, t)."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.weights = style, torch.zeros(0)
        self.score, self.value, self.hidden, self.gate = nn.Linear(C, 1), nn.Linear(C, C), nn.Linear(C, 6), nn.Linear(C, 6)
        self.of_hidden, self.context, self.of_heads = nn.Linear(6, 1), nn.Parameter(torch.randn(6)), nn.Linear(C, H)
        self.of_pixels, self.query = nn.Conv2d(C, 1, 1), nn.Parameter(torch.randn(1, 1, C))
        self.network = nn.Sequential(nn.Linear(C, 6), nn.Tanh(), nn.Linear(6, 1), nn.Sigmoid())
        self.forwards, self.backwards = (nn.GRU(C, C // 2, batch_first=True) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.style)(x)

    def store(self, weights: Tensor) -> Tensor:
        self.weights = weights.detach().reshape(B, -1, 1, T)
        return weights

    def sum_of_tokens(self, x: Tensor) -> Tensor:
        return (self.store(self.score(x).softmax(1)) * x).sum(1)

    def sum_of_values(self, x: Tensor) -> Tensor:
        return (self.store(F.softmax(self.score(x.tanh()), dim=-2)) * self.value(x)).sum(dim=-2, keepdim=True)

    def product(self, x: Tensor) -> Tensor:
        return self.store(self.score(x).softmax(1)).mT @ x

    def einsum(self, x: Tensor) -> Tensor:
        return torch.einsum("bt,btc->bc", self.store(self.score(x).squeeze(-1).softmax(-1)), self.value(x))

    def einsum_of_one_score(self, x: Tensor) -> Tensor:
        """The axis of the score, of size 1, is summed in the weights alone."""
        return torch.einsum("bto,btd->bd", self.store(self.score(x).softmax(1)), x)

    def einsum_of_one_row(self, x: Tensor) -> Tensor:
        return torch.einsum("bij,bjd->bd", self.store(self.score(x).mT.softmax(-1)), x)

    def gated(self, x: Tensor) -> Tensor:
        """Ilse et al. 2018, https://arxiv.org/abs/1802.04712."""
        scores = self.of_hidden(self.hidden(x).tanh() * self.gate(x).sigmoid()).mT
        return torch.bmm(self.store(scores.softmax(2)), x)

    def context_vector(self, x: Tensor) -> Tensor:
        """Yang et al. 2016, Hierarchical attention networks for document classification."""
        scores = self.hidden(x).tanh() @ self.context
        return (self.store(scores.softmax(1)).unsqueeze(-1) * x).sum(1)

    def masked(self, x: Tensor) -> Tensor:
        hidden = torch.arange(T) >= torch.tensor([T, T - 2, T - 3]).unsqueeze(1)
        scores = self.score(x).squeeze(-1).masked_fill(hidden, -torch.inf)
        return (self.store(scores.softmax(-1)).unsqueeze(1) @ x).squeeze(1)

    def places(self, x: Tensor) -> Tensor:
        scores = self.score(torch.tanh(x + torch.linspace(0, 1, T).unsqueeze(-1)))
        return (self.store(scores.softmax(1)) * x).sum(1)

    def pixels(self, x: Tensor) -> Tensor:
        """Cao et al. 2019, GCNet, https://arxiv.org/abs/1904.11492."""
        image = x.mT.unflatten(2, (T, 1))
        weights = self.store(self.of_pixels(image).flatten(2).softmax(2))
        return torch.matmul(image.flatten(2).unsqueeze(1), weights.unsqueeze(-1)).squeeze(-1)

    def tokens_first(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1).contiguous()
        weights = self.score(x).softmax(0)  # (t, b, 1)
        self.store(weights.transpose(0, 1))
        return (weights * x).sum(0)

    def bag(self, x: Tensor) -> Tensor:
        """Rows without a batch are the instances of one bag."""
        weights = self.of_hidden(self.hidden(x[0]).tanh()).mT.softmax(1)
        self.weights = weights.detach().view(1, 1, 1, T)
        return weights @ x[0]

    def beside_mean(self, x: Tensor) -> Tensor:
        scores = F.leaky_relu(self.score(x) + self.score(x.mean(1, keepdim=True)))
        return (self.store(scores.softmax(1)) * x).sum(1)

    def gated_tokens(self, x: Tensor) -> Tensor:
        weights = self.store(self.score(x.tanh() * x.sigmoid()).softmax(1))
        return self.value(x) * (weights * x).sum(1, keepdim=True)

    def one_of_several_scores(self, x: Tensor) -> Tensor:
        weights = self.store(self.of_heads(x)[..., 0].softmax(1))
        return self.value(x) * torch.einsum("bt,btc->bc", weights, x).unsqueeze(1)

    def heads(self, x: Tensor) -> Tensor:
        """Each head scores the tokens, and pools features of its own."""
        weights = self.of_heads(x).softmax(1)
        self.weights = weights.detach().mT.unsqueeze(2)
        return (weights.unsqueeze(-1) * self.value(x).unflatten(-1, (H, -1))).sum(1)

    def heads_by_einsum(self, x: Tensor) -> Tensor:
        weights = self.of_heads(x).softmax(1)
        self.weights = weights.detach().mT.unsqueeze(2)
        return torch.einsum("bth,bthd->bhd", weights, self.value(x).unflatten(-1, (H, -1)))

    def exponentials(self, x: Tensor) -> Tensor:
        weights = self.score(x).exp()
        return (self.store(weights / weights.sum(1, keepdim=True)) * x).sum(1)

    def logarithms(self, x: Tensor) -> Tensor:
        return (self.store(self.score(x).log_softmax(1).exp()) * x).sum(1)

    def product_of_logarithms(self, x: Tensor) -> Tensor:
        return self.store(F.log_softmax(self.score(x).mT, -1).exp()) @ self.value(x)

    def learned_query_by_logarithms(self, x: Tensor) -> Tensor:
        return self.store(torch.log_softmax(self.query @ self.value(x).mT, -1).exp()) @ x

    def sigmoids(self, x: Tensor) -> Tensor:
        gates = self.score(x).sigmoid()
        return (self.store(gates / gates.sum(1, keepdim=True)) * x).sum(1)

    def product_of_sigmoids(self, x: Tensor) -> Tensor:
        gates = torch.sigmoid(self.score(x).mT)
        return self.store(gates / gates.sum(-1, keepdim=True)) @ self.value(x)

    def masked_sigmoids(self, x: Tensor) -> Tensor:
        gates = self.score(x).squeeze(-1).sigmoid() * (torch.arange(T) < torch.tensor([T, T - 2, T - 3]).unsqueeze(1))
        return torch.einsum("bt,btc->bc", self.store(gates / gates.sum(-1, keepdim=True).clamp(min=1e-9)), x)

    def sigmoids_of_a_network(self, x: Tensor) -> Tensor:
        gates = self.network(x)
        gates /= gates.sum(1, keepdim=True)
        return (self.store(gates) * x).sum(1)

    def sigmoids_of_heads(self, x: Tensor) -> Tensor:
        gates = nn.Sigmoid()(self.of_heads(x))
        weights = gates / gates.sum(1, keepdim=True)
        self.weights = weights.detach().mT.unsqueeze(2)
        return torch.einsum("bth,bthd->bhd", weights, self.value(x).unflatten(-1, (H, -1)))

    def norm_of_softplus(self, x: Tensor) -> Tensor:
        return (self.store(F.normalize(F.softplus(self.score(x)), p=1, dim=1)) * x).sum(1)

    def rectified_scores(self, x: Tensor) -> Tensor:
        gates = F.relu(self.score(x))
        return (self.store(gates / gates.sum(1, keepdim=True)) * x).sum(1)

    def statistics(self, x: Tensor) -> Tensor:
        """Okabe et al. 2018, Attentive statistics pooling, https://arxiv.org/abs/1803.10963."""
        weights = self.store(self.score(x).softmax(1))
        mean = (weights * x).sum(1)
        return torch.cat([mean, ((weights * x.square()).sum(1) - mean.square()).clamp(min=1e-9).sqrt()], 1)

    def learned_query(self, x: Tensor) -> Tensor:
        return self.store((self.query @ self.value(x).mT).softmax(-1)) @ x

    def context_vector_by_sums(self, x: Tensor) -> Tensor:
        scores = (self.hidden(x).tanh() * self.context).sum(-1)
        return (self.store(scores.softmax(1)).unsqueeze(-1) * x).sum(1)

    def both_directions(self, x: Tensor) -> Tensor:
        x = torch.cat([self.forwards(x)[0], self.backwards(x.flip(1))[0].flip(1)], -1)
        return (self.store(self.score(x.tanh()).softmax(1)) * x).sum(1)

    def dropped(self, x: Tensor) -> Tensor:
        return (F.dropout(self.store(nn.Softmax(dim=1)(self.score(x))), 0.1, self.training) * x).sum(1)


STYLES = [name for name in vars(Pooling) if name not in ("forward", "store") and not name.startswith("_")]


@pytest.mark.parametrize("style", STYLES)
def test_the_weights_of_attention_pooling_are_recorded(style):
    torch.manual_seed(1)
    model = Pooling(style).eval()
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    (call,) = recording.calls
    torch.testing.assert_close(call.map.dense(), model.weights, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("style", ["sum_of_tokens", "sigmoids", "logarithms"])
def test_cut_tokens_are_left_out_of_the_sums_of_weights(style):
    model, x = Pooling(style), torch.randn(B, T, C)
    with torch.no_grad(), regard.intervene(model, CutEdges(queries=[0], keys=[1, 3])):
        found = model(x)
    left = model.weights.mT[:, 0].index_fill(1, torch.tensor([1, 3]), 0)
    torch.testing.assert_close(found, (left / left.sum(1, keepdim=True) * x).sum(1), rtol=0, atol=EQUAL)


class Heads(nn.Module):
    """Heads pool features of their own, in layouts in which they stand before the batch or beside it."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.num_heads, self.score, self.value = style, H, nn.Linear(C, H), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        weights, v = self.score(x).softmax(1).permute(2, 0, 1), self.value(x).unflatten(-1, (H, -1)).permute(2, 0, 1, 3)
        self.weights = weights.transpose(0, 1)
        if self.style == "product":
            return (weights.unsqueeze(2) @ v).squeeze(2).transpose(0, 1).flatten(1)
        if self.style == "einsum":
            return torch.einsum("hbt,bthd->bhd", weights, v.permute(1, 2, 0, 3))
        if self.style == "heads before the batch in one axis":
            return torch.bmm(weights.flatten(0, 1).unsqueeze(1), v.flatten(0, 1)).view(H, -1, C // H).transpose(0, 1).flatten(1)
        weights, v = (one.transpose(0, 1).flatten(0, 1) for one in (weights, v))
        return torch.bmm(weights.unsqueeze(1), v).view(len(x), C)


@pytest.mark.parametrize("batch", [1, H, B])
@pytest.mark.parametrize(
    "style", ["product", "einsum", "heads before the batch in one axis", "heads behind the batch in one axis"]
)
def test_heads_before_the_batch_are_not_taken_for_it(style, batch):
    model = Heads(style)
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(batch, T, C)))
    torch.testing.assert_close(recording.map(0).dense()[:, :, 0], model.weights.detach(), rtol=0, atol=EQUAL)


class NoPooling(nn.Module):
    """Softmaxes over tokens that weigh no tokens, and softmaxes over other axes."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.score, self.experts = style, nn.Linear(C, 1), nn.Linear(C, 4 * C)
        self.router, self.mix = nn.Linear(C, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "router":
            return (self.router(x).softmax(-1).unsqueeze(-1) * self.experts(x).unflatten(-1, (4, C))).sum(-2)
        if self.style == "router of as many experts as tokens":
            return (self.router(x[:, :4]).softmax(-1).unsqueeze(-1) * self.experts(x[:, :4]).unflatten(-1, (4, C))).sum(-2)
        if self.style == "router of sigmoids":
            gates = self.router(x).sigmoid()
            return ((gates / gates.sum(-1, keepdim=True)).unsqueeze(-1) * self.experts(x).unflatten(-1, (4, C))).sum(-2)
        if self.style == "sigmoids of channels":
            gates = self.experts(x)[..., :C].sigmoid()
            return (gates / gates.sum(1, keepdim=True) * x).sum(1)
        if self.style == "router of logarithms":
            return torch.einsum("bte,btec->btc", self.router(x).log_softmax(-1).exp(), self.experts(x).unflatten(-1, (4, C)))
        if self.style == "an entropy":
            logarithms = self.score(x).log_softmax(1)
            return -(logarithms.exp() * logarithms).sum(1)
        if self.style == "places":
            return (self.score(x).softmax(1) * torch.linspace(0, 1, T).unsqueeze(-1)).sum(1)
        if self.style == "one number for each token":
            return (self.score(x).softmax(1) * x[..., :1]).sum(1)
        if self.style == "layers":
            return (self.mix.softmax(0).view(4, 1, 1, 1) * torch.stack([x * n for n in range(4)])).sum(0)
        if self.style == "a loss of samples":
            weights = self.score(x.mean(1)).softmax(0).unsqueeze(-1)
            return (weights * F.mse_loss(x, x.flip(1), reduction="none")).sum(0).mean()
        if self.style == "parts of one vector":
            parts = self.experts(x[:, 0]).unflatten(-1, (4, C))
            return (self.score(parts).softmax(-2) * parts).sum(-2)
        assert self.style == "scaled tokens"
        return self.score(x).softmax(1) * x


@pytest.mark.parametrize(
    "style",
    [
        *("router", "router of as many experts as tokens", "places", "one number for each token", "layers"),
        *("scaled tokens", "a loss of samples", "parts of one vector", "router of sigmoids", "sigmoids of channels"),
        *("router of logarithms", "an entropy"),
    ],
)
def test_softmaxes_that_pool_no_tokens_are_not_recorded(style):
    with regard.record(model := NoPooling(style)) as recording:
        model(torch.randn(B, T, C))
    assert not recording.calls
    assert not recording.missed
