"""Loops are followed beside attention that is written out by hand, and take nothing away from it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, distance, record_and_compare
from regard.observe.interception.handwritten.unread.unread_recurrences import LOOP

pytestmark = pytest.mark.usefixtures("in_float64")


class Written(nn.Module):
    """Attention as a function of projections writes it out, which returns the context and the weights."""

    def __init__(self, form: Callable[["Written", Tensor], tuple[Tensor, Tensor]], width: int = 8):
        super().__init__()
        self.form = form
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.table = nn.Parameter(torch.randn(4, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)[0]


def score(layer: Written, x: Tensor) -> Tensor:
    return layer.q(x) @ layer.k(x).mT


def copy_rows(layer, x):
    v, values, weights = layer.v(x), torch.zeros_like(x), score(layer, x).softmax(-1)
    for b in range(len(x)):
        values[b].copy_(v[b])
    return weights @ values, weights


def copy_to_part(layer, x):
    values, weights = torch.zeros_like(x), score(layer, x).softmax(-1)
    values.narrow(1, 0, x.shape[1]).copy_(layer.v(x))
    return weights @ values, weights


def copy_keys(layer, x):
    keys, k = torch.zeros_like(x), layer.k(x)
    for b in range(len(x)):
        keys[b].copy_(k[b])
    weights = (layer.q(x) @ keys.mT).softmax(-1)
    return weights @ layer.v(x), weights


def fill_values(layer, x):
    values, weights = torch.zeros_like(x), score(layer, x).softmax(-1)
    with torch.no_grad():
        torch.matmul(x, layer.v.weight.mT, out=values)
    return weights @ values, weights


def fill_weights(layer, x):
    with torch.no_grad():
        weights = torch.zeros(len(x), x.shape[1], x.shape[1])
        torch.softmax(score(layer, x), -1, out=weights)
    return weights @ layer.v(x), weights


def embed_numbers(layer, x):
    values, weights = torch.zeros_like(x) + x[..., :1] * layer.table[0], score(layer, x).softmax(-1)
    return weights @ values, weights


def sum_embeddings(layer, x):
    values = sum(x[..., i : i + 1] * layer.table[i] for i in range(4))
    weights = score(layer, x).softmax(-1)
    return weights @ values, weights


def sum_embedded_keys(layer, x):
    keys = sum(x[..., i : i + 1] * layer.table[i] for i in range(4))
    weights = (layer.q(x) @ keys.mT).softmax(-1)
    return weights @ layer.v(x), weights


SOFTMAXES = (copy_rows, copy_to_part, copy_keys, fill_values, fill_weights, embed_numbers, sum_embeddings, sum_embedded_keys)


@pytest.mark.parametrize("form", SOFTMAXES)
def test_attention_with_tensors_that_were_zeros_or_sums_of_outer_products_is_recorded(form):
    model, x = Written(form), torch.randn(3, 7, 8)
    with torch.no_grad():
        recording, _ = record_and_compare(model, lambda model: model(x))
        _, weights = form(model, x)
    assert len(recording.calls) == 1
    assert distance(recording.map(0), weights.unsqueeze(1)) < EQUAL


def test_scores_that_are_summed_feature_by_feature_are_linear_attention():
    def sum_scores(layer, x):
        q, k, weights = layer.q(x), layer.k(x), 0
        for i in range(q.shape[2]):
            weights = weights + torch.einsum("bq,bk->bqk", q[..., i], k[..., i])
        return weights @ x, weights

    model, x = Written(sum_scores), torch.randn(3, 7, 8)
    recording, _ = record_and_compare(model, lambda model: model(x))
    with torch.no_grad():
        _, weights = sum_scores(model, x)
    found = recording.map(0, kind="implicit").dense()
    assert (found - weights.unsqueeze(1)).abs().max() < EQUAL * weights.abs().max()


class Memory(nn.Module):
    """A memory of zeros that heads read by softmaxes and write to, as of a Neural Turing Machine."""

    def __init__(self):
        super().__init__()
        self.key, self.erase = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        memory, outputs, self.weights = torch.zeros(len(x), 5, 8), [], []
        for i in range(x.shape[1]):
            weights = torch.bmm(memory, self.key(x[:, i]).unsqueeze(-1)).squeeze(-1).softmax(-1)
            outputs.append(torch.bmm(weights.unsqueeze(1), memory).squeeze(1))
            erased = weights.unsqueeze(-1) * self.erase(x[:, i]).sigmoid().unsqueeze(1)
            memory = memory * (1 - erased) + weights.unsqueeze(-1) * x[:, i].unsqueeze(1)
            self.weights.append(weights)
        return torch.stack(outputs, 1)


def test_each_read_of_a_memory_by_a_softmax_is_recorded_from_the_first_write_on():
    model, x = Memory(), torch.randn(3, 7, 8)
    recording, _ = record_and_compare(model, lambda model: model(x), missing=True)  # what it writes by the last weights
    softmaxes = [call for call in recording.calls if call.kind != "implicit"]
    assert len(softmaxes) == x.shape[1] - 1
    for call, weights in zip(softmaxes, model.weights[1:], strict=True):
        assert distance(call.map, weights.view(3, 1, 1, 5)) < EQUAL


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_product_of_nested_tensors_runs_as_without_a_recording():
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first, second = torch.nested.nested_tensor([x[0], x[1, :4]]), torch.nested.nested_tensor([x[0].mT, x[1].mT])
            return torch.bmm(first, second).to_padded_tensor(0.0)

    record_and_compare(Nested(), lambda model: model(torch.randn(2, 7, 8)))


class Sums(nn.Module):
    """A layer without attention, of sums of outer products."""

    def __init__(self, form: Callable[["Sums", Tensor], Tensor]):
        super().__init__()
        self.form = form
        self.gate, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.vectors, self.matrices = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x)


def mix_experts(layer, x):
    """As CondConv. https://arxiv.org/abs/1904.04971"""
    gates = layer.gate(x.mean(1)).sigmoid()
    return x @ sum(gates[:, i, None, None] * layer.matrices[i] for i in range(4))


def mix_experts_from_zeros(layer, x):
    gates, weight = layer.gate(x.mean(1)).sigmoid(), torch.zeros(len(x), 8, 8)
    for i in range(4):
        weight = weight + gates[:, i, None, None] * layer.matrices[i]
    return x @ weight


def adapt_weight(layer, x):
    u = layer.vectors
    return x @ (layer.out.weight + torch.outer(u[0], u[1]) + torch.outer(u[2], u[3]))


def flow(layer, x):
    """As planar flows. https://arxiv.org/abs/1505.05770"""
    for u, w in zip(layer.vectors, layer.out.weight, strict=False):
        x = x + u * torch.tanh(x @ w).unsqueeze(-1)
    return x


def reflect(layer, x):
    for v in nn.functional.normalize(layer.vectors, dim=-1):
        x = x - 2 * (x @ v).unsqueeze(-1) * v
    return x


def rotate(layer, x):
    axis = nn.functional.normalize(layer.vectors[0], dim=0)
    matrix = torch.eye(8) + 0.3 * torch.outer(axis, axis)
    return x @ (matrix + 0.1 * torch.outer(axis, layer.vectors[1]))


def generate_weight(layer, x):
    z = layer.gate(x.mean(1))
    return x @ (z.unsqueeze(-1) * z.unsqueeze(-2) + layer.out.weight)


def generate_weight_by_terms(layer, x):
    z, weight = layer.gate(x.mean(1)), layer.out.weight
    for i in range(3):
        weight = weight + z.unsqueeze(-1) * layer.vectors[i]
    return x @ weight


def sum_covariance(layer, x):
    y, covariance = layer.gate(x), torch.zeros(len(x), 8, 8)
    for i in range(x.shape[1]):
        d = y[:, i] - y.mean(1)
        covariance = covariance + d.unsqueeze(-1) * d.unsqueeze(-2)
    return y @ covariance


def expand_polynomial(layer, x):
    features = x[..., :1] * layer.vectors[0]
    for i in range(1, 4):
        features = features + x[..., :1] ** (i + 1) * layer.vectors[i]
    return (features * layer.gate(x)).sum(-1)


def add_rank_one(layer, x):
    for i in range(4):
        x = x + torch.sigmoid(layer.gate(x))[..., i : i + 1] * layer.vectors[i]
    return layer.out(x)


SUMS = (
    *(mix_experts, mix_experts_from_zeros, adapt_weight, flow, reflect, rotate, generate_weight, generate_weight_by_terms),
    *(sum_covariance, expand_polynomial, add_rank_one),
)


@pytest.mark.parametrize("form", SUMS)
def test_sums_of_outer_products_without_attention_are_neither_recorded_nor_missed(form):
    recording, _ = record_and_compare(Sums(form), lambda model: model(torch.randn(3, 7, 8)))
    assert not recording.calls


class Gates(Written):
    """Attention and a loop over vectors in one forward: the sum of both."""

    def forward(self, x: Tensor) -> Tensor:
        h, self.states = torch.zeros(len(x), 8), []
        for i in range(x.shape[1]):
            z = self.q(x[:, i]).sigmoid()
            h = (1 - z) * h + z * self.v(x[:, i])
            self.states.append(h)
        return self.form(self, x)[0] + torch.stack(self.states, 1)


def attend_by_hand(layer, x):
    weights = score(layer, x).softmax(-1)
    return weights @ layer.k(x), weights


def attend_by_kernel(layer, x):
    context = nn.functional.scaled_dot_product_attention(layer.q(x), layer.k(x), layer.k(x), scale=1.0)
    return context, score(layer, x).softmax(-1)


@pytest.mark.parametrize("form", [attend_by_hand, attend_by_kernel])
def test_a_loop_over_vectors_is_recorded_beside_attention_of_the_same_module(form):
    model, x = Gates(form), torch.randn(3, 7, 8)
    recording, _ = record_and_compare(nn.Sequential(model), lambda model: model(x))
    with torch.no_grad():
        weights = form(model, x)[1]
    assert sorted(call.kind for call in recording.calls) == ["implicit", "self"]
    assert distance(recording.map(0), weights.unsqueeze(1)) < EQUAL
    product = recording.map(0, kind="implicit") @ recording.values(0, kind="implicit")
    assert (product.squeeze(-1).mT - torch.stack(model.states, 1)).abs().max() < EQUAL


def test_a_loop_over_vectors_that_is_not_read_is_missed_beside_attention_of_the_same_module():
    class Growing(Written):
        def forward(self, x: Tensor) -> Tensor:
            h, states = torch.zeros(len(x), 8), []
            for i in range(x.shape[1]):
                h = self.q(x[:, i]).exp() * h + self.v(x[:, i])
                states.append(h)
            return self.form(self, x)[0] + torch.stack(states, 1)

    recording, _ = record_and_compare(Growing(attend_by_hand), lambda model: model(torch.randn(3, 7, 8)), missing=True)
    assert [call.kind for call in recording.calls] == ["self"]
    assert [one.reason for one in recording.missed] == [LOOP]
