"""A module that is called attention and whose attention no hook sees is in `missed`, once; one that did not attend is not."""

import pytest
import torch
from torch import Tensor, nn

from observe.family import WORDS, B, Family
from regard.observe import record
from regard.observe.interception.recurrent.token_mixers import UNSEEN

REASON = "no attention of it was seen"
pytestmark = pytest.mark.filterwarnings("ignore:not recorded")


class OutsideAttention(nn.Module):
    """Attention whose scores and products leave torch, as those of an extension in C++."""

    def __init__(self, attends=True):
        super().__init__()
        self.q_proj, self.kv_proj, self.attends = nn.Linear(8, 8), nn.Linear(8, 16), attends

    def forward(self, x: Tensor) -> Tensor:
        if not self.attends:
            return x
        q, (k, v) = self.q_proj(x).detach().numpy(), (y.detach().numpy() for y in self.kv_proj(x).chunk(2, -1))
        weights = torch.from_numpy(q @ k.swapaxes(1, 2)).softmax(-1).numpy()
        return torch.from_numpy(weights @ v)


def test_attention_outside_of_torch_is_missed_once_and_says_why():
    model, x = nn.Sequential(OutsideAttention(), nn.Linear(8, 8)), torch.randn(2, 5, 8)
    with record(model) as recording:
        model(x)
        model(x)
    assert not recording.calls
    assert [(one.kernel, one.module) for one in recording.missed] == [("OutsideAttention", "0")]
    assert REASON in recording.missed[0].reason


def test_attention_that_did_not_run_is_not_missed():
    model = nn.Sequential(OutsideAttention(attends=False), nn.Linear(8, 8))
    with record(model) as recording:
        model(torch.randn(2, 5, 8))
    assert not recording.missed


class Mixer(nn.Module):
    """A memory of keys and values that a nonlinear function changes at each token, in a class that is not called attention."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        state, out = torch.zeros(len(x), 8, 8), []
        for n in range(x.shape[1]):
            state = torch.tanh(0.9 * state + k[:, n, :, None] * v[:, n, None])
            out.append((q[:, n, None] @ state).squeeze(1))
        return torch.stack(out, 1)


class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.add_module(name, Mixer())

    def forward(self, x: Tensor) -> Tensor:
        return next(self.children())(x)


@pytest.mark.parametrize(("name", "is_missed"), [("self_attn", True), ("mixer", False)])
def test_a_module_whose_place_in_the_model_is_called_attention_is_missed_too(name, is_missed):
    model = nn.Sequential(Block(name))
    with record(model) as recording:
        model(torch.randn(2, 5, 8))
    assert [(one.kernel, one.module) for one in recording.missed] == [("Mixer", f"0.{name}")] * is_missed
    assert all(REASON in one.reason for one in recording.missed)


class DotProduct(nn.Module):
    """Scaled scores in another order, which are multiplied with values as they are, and not divided by their number."""

    def __init__(self, name):
        super().__init__()
        self.name, self.other = name, nn.Linear(8, 16)
        self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = getattr(self, self.name)(x), self.other(x).chunk(2, -1)
        return (q @ k.mT / 8**0.5).flip(-1) @ v


@pytest.mark.parametrize(("name", "is_missed"), [("to_q", True), ("first", False)])
def test_scores_times_values_are_missed_in_a_module_that_projects_queries(name, is_missed):
    model = nn.Sequential(DotProduct(name))
    with record(model) as recording:
        model(torch.randn(2, 5, 8))
    assert [(one.kernel, one.module, one.reason) for one in recording.missed] == [("DotProduct", "0", UNSEEN)] * is_missed


class Projections(nn.Module):
    """The queries, keys and values of attention that another module computes."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [2 * project(x).unflatten(-1, (2, 4)).transpose(1, 2) for project in (self.q, self.k, self.v)]


class OutsideProjections(nn.Module):
    """Attention whose projections are in a part of this name."""

    def __init__(self, name):
        super().__init__()
        self.add_module(name, Projections())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = next(self.children())(x)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", ["attn_proj", "attention"])
def test_projections_of_attention_that_another_module_computes_are_not_missed(name):
    model = nn.Sequential(OutsideProjections(name))
    with record(model) as recording:
        model(torch.randn(2, 5, 8))
        model(torch.randn(2, 7, 8))
    assert [call.name for call in recording.calls] == ["0", "0"]
    assert not recording.missed


class GatedMLP(nn.Module):
    """An MLP whose first layer has the name of a projection of attention."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out, self.q_proj = nn.Linear(8, 32), nn.Linear(16, 8), None

    def forward(self, x: Tensor) -> Tensor:
        gate, hidden = self.in_proj(x).chunk(2, -1)
        return self.out(hidden * gate.sigmoid())


@pytest.mark.parametrize("name", ["post_attention_mlp", "attention"])
def test_a_gated_mlp_at_a_place_that_is_called_attention_is_not_missed(name):
    model = nn.Sequential(Block(name))
    setattr(model[0], name, GatedMLP())
    with record(model) as recording:
        model(torch.randn(2, 5, 8))
    assert not recording.missed


@pytest.mark.slow
def test_without_its_kernel_every_layer_of_mra_is_missed():
    settings = {
        "vocab_size": WORDS,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 36,
        "max_position_embeddings": 64,
    }
    model = Family("mra", "MraModel", settings).build()
    given = {"input_ids": torch.randint(3, WORDS, (B, 64)), "attention_mask": torch.ones(B, 64, dtype=torch.long)}
    with record(model) as recording:
        model(**given)
    assert [one.module for one in recording.missed] == [f"encoder.layer.{n}.attention.self" for n in range(2)]
    assert all(REASON in one.reason for one in recording.missed)


def score_neighbors(q, k, bias, kernel, dilation):
    """Numbers of the shape of natten2dqkrpb's, computed outside of torch as there: each place scores itself."""
    scores = (q.detach().numpy() * k.detach().numpy()).sum(-1, keepdims=True)
    return torch.from_numpy(scores.repeat(kernel * kernel, -1))


def weigh_neighbors(weights, v, kernel, dilation):
    """Numbers of the shape of natten2dav's, computed outside of torch as there."""
    context = weights.detach().numpy().sum(-1, keepdims=True) * v.detach().numpy()
    return torch.from_numpy(context.transpose(0, 3, 2, 1, 4))  # the layer puts heads third, and expects them first


@pytest.mark.slow
def test_every_layer_of_dinat_is_missed(monkeypatch):
    import transformers.models.dinat.modeling_dinat as modeling

    monkeypatch.setattr(modeling, "natten2dqkrpb", score_neighbors)
    monkeypatch.setattr(modeling, "natten2dav", weigh_neighbors)
    monkeypatch.setattr(modeling, "requires_backends", lambda *_: None)
    settings = {"embed_dim": 12, "depths": [1, 2], "num_heads": [2, 3], "kernel_size": 3, "dilations": [[1], [1, 2]]}
    model = Family("dinat", "DinatModel", settings).build()
    with record(model) as recording:
        model(torch.randn(B, 3, 48, 48))
    assert not recording.calls
    assert len(recording.missed) == 3
    assert all(one.kernel == "NeighborhoodAttention" and REASON in one.reason for one in recording.missed)
