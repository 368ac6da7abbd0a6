"""The rollout of layers without a softmax, alone and between layers with one, is the product of their dense matrices."""

import pytest
import torch
from torch import nn

import regard
from bounds import sum_bound
from dense import close
from observe.recurrent_models import RECURRENT, draw_tokens
from regard import ConfigError
from regard.observe.rollout import iterate_rollouts, rollout

FAMILIES = {one.name: one for one in RECURRENT}
T = 13


def record(name):
    model = FAMILIES[name].build().double()
    with torch.no_grad(), regard.record(model) as recording:
        model(draw_tokens(T))
    return recording


def multiply_layers(recording, layers, residual=0.5):
    """The product of ½ A + ½ I of (kind, number), last layer first, with the rows of softmax layers divided by their sums."""
    product = torch.eye(T, dtype=torch.float64)
    for kind, number in layers:
        a = recording.map(number, kind=kind).dense().double().mean(1)
        layer = (1 - residual) * a + residual * torch.eye(T, dtype=torch.float64)
        product = (layer / layer.sum(-1, keepdim=True) if kind == "self" else layer) @ product
    return product


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv"])
def test_a_model_without_a_softmax_is_the_product_of_its_signed_matrices(name):
    recording = record(name)
    layers = [("implicit", n) for n in range(len(recording.layers("implicit")))]
    expected = multiply_layers(recording, layers)
    close(rollout(recording), expected)
    close(rollout(recording, [-1], kind="implicit", residual=0.25), multiply_layers(recording, layers, 0.25)[:, [-1]])
    whole = torch.eye(T, dtype=torch.float64)
    for _, number in layers:
        whole = (torch.eye(T, dtype=torch.float64) + recording.map(number, kind="implicit").dense().mean(1)) @ whole
    close(rollout(recording) * 2 ** len(layers), whole)  # as Ali et al. write it


@pytest.mark.parametrize(
    "name",
    ["bamba", "recurrent_gemma", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "qwen3_5_text"))],
)
def test_a_hybrid_is_multiplied_in_the_order_its_layers_ran(name):
    recording = record(name)
    ran = {"implicit": 0, "self": 0}
    layers = []
    for call in recording.calls:
        layers.append((call.kind, ran[call.kind]))
        ran[call.kind] += 1
    assert all(ran.values())
    is_double = all(recording.map(n, kind=kind).dtype == torch.float64 for kind, n in layers if kind == "implicit")
    atol = 1e-10 if is_double else sum_bound(torch.float32, T)  # some compute decays in float32
    close(rollout(recording), multiply_layers(recording, layers), atol)
    few = multiply_layers(recording, [layers[0], layers[2]])[:, [3]]
    close(rollout(recording, [3], layers=[0, 2]), few, atol)
    close(rollout(recording, layers=recording.names[:2]), multiply_layers(recording, layers[:2]), atol)
    some = [one for one in layers if one[0] == "self"]
    close(rollout(recording, kind="self"), multiply_layers(recording, some))
    found = list(iterate_rollouts(recording))
    assert len(found) == len(layers)
    for count, one in enumerate(found, 1):
        close(one, multiply_layers(recording, layers[:count]), atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon_h1", "zamba2"])
def test_layers_of_both_kinds_in_one_block_are_refused(name):
    recording = record(name)
    with pytest.raises(ConfigError, match=r"are in one block.*pass kind='self'"):
        rollout(recording)
    softmax = [("self", n) for n in range(len(recording.layers()))]
    close(rollout(recording, kind="self"), multiply_layers(recording, softmax))


class Both(nn.Module):
    """A softmax and a relu beside each other."""

    def forward(self, x):
        scores = (x @ x.mT).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ x + (scores.relu() / T) @ x


def test_layers_of_both_kinds_in_one_module_are_refused():
    model = nn.Sequential(Both())
    with torch.no_grad(), regard.record(model) as recording:
        model(torch.randn(2, T, 7).double())
    assert recording.layers() == recording.layers("implicit") == ["0"]
    with pytest.raises(ConfigError, match=r"are in one block.*pass kind='self'"):
        rollout(recording)


class Cross(nn.Module):
    """Attention of activated scores of one text to another of the same length."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x, other):
        q, (k, v) = self.q(x), self.kv(other).chunk(2, -1)
        return torch.relu(q @ k.mT) @ v


def test_what_may_be_cross_attention_is_refused():
    torch.manual_seed(0)
    model = Cross().double()
    with torch.no_grad(), regard.record(model) as recording:
        model(*torch.randn(2, 1, T, 8).double())
    assert len(recording.layers("implicit")) == 1
    with pytest.raises(ConfigError, match="whether its keys are the tokens of its queries is not recorded"):
        rollout(recording)
    close(rollout(recording, kind="implicit"), multiply_layers(recording, [("implicit", 0)]))
