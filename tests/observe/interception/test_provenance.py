"""What queries and keys were made from is followed through functions that take their tensors in lists."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.observe import record

JOINED = {
    "memory beside itself": (lambda x, memory: torch.cat([memory, memory], 1), "cross"),
    "memory by name": (lambda x, memory: torch.cat(tensors=(memory, memory), dim=1), "cross"),
    "memory after the queries' own": (lambda x, memory: torch.cat([x, memory], 1), "self"),
    "memory, of which only the first is taken": (lambda x, memory: torch.stack([memory, memory])[0], "cross"),
    "memory times a matrix": (lambda x, memory: torch.einsum("btc,cd->btd", [memory, torch.eye(8)]), "cross"),
}


class Reads(nn.Module):
    """Attention to what some function makes of the queries' input and of a memory."""

    def __init__(self, joined):
        super().__init__()
        self.q, self.k, self.joined = nn.Linear(8, 8), nn.Linear(8, 8), joined

    def forward(self, x, memory):
        q, k = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.q(x), self.k(self.joined(x, memory))))
        return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize(("joined", "kind"), JOINED.values(), ids=list(JOINED))
def test_what_was_joined_in_a_list_is_where_keys_come_from(joined, kind):
    model = Reads(joined)
    with record(model) as recording:
        model(torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    assert [call.kind for call in recording.calls] == [kind]


@pytest.mark.parametrize(("joined", "kind"), [(lambda x, memory: x, "self"), (lambda x, memory: memory, "cross")])
@pytest.mark.parametrize("path", [["multihead_attn"], ["0", "multihead_attn"]])
def test_a_module_with_the_name_of_torchs_cross_attention_is_of_the_kind_that_its_inputs_make_it(joined, kind, path):
    model = Reads(joined)
    for name in reversed(path):
        model = nn.Sequential(OrderedDict({name: model}))
    with record(model) as recording:
        for module in model.modules():  # Sequential passes one argument
            if isinstance(module, Reads):
                module(torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    assert [(call.name, call.kind) for call in recording.calls] == [(".".join(path), kind)]


class Weighs(nn.Module):
    """Attention whose matrices, larger than the tokens, are no parameters: made on the way, or buffers."""

    def __init__(self, project):
        super().__init__()
        self.project = project
        self.register_buffer("weights", torch.randn(8, 24))

    def forward(self, x, memory):
        q, k, v = (self.project(y, w) for y, w in zip((x, memory, memory), self.weights.chunk(3, 1), strict=True))
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)


PROJECTIONS = {
    "a product": torch.matmul,
    "a product with its sides exchanged": lambda y, w: (w.T @ y.mT).mT,
    "linear": lambda y, w: F.linear(y, w.T),
    "einsum": lambda y, w: torch.einsum("cd,btc->btd", w, y),
    "weights in another precision": lambda y, w: y @ w.double().float(),
    "weights that a scale restores": lambda y, w: y @ (torch.full_like(w, 0.5) * w),
}


@pytest.mark.parametrize("project", PROJECTIONS.values(), ids=list(PROJECTIONS))
def test_queries_and_keys_come_from_tokens_and_not_from_larger_weights(project):
    model, x = Weighs(project), torch.randn(1, 3, 8)
    with record(model) as recording:
        model(x, x)
        model(x, torch.randn(1, 5, 8))
    assert [call.kind for call in recording.calls] == ["self", "cross"]


class Sums(nn.Module):
    """Attention after a residual connection, called with parameters from outside."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = x + x.mean(1, keepdim=True)
        q, k = (F.linear(x, w)[:, None] for w in (self.q, self.k))
        return F.scaled_dot_product_attention(q, k, k)


def test_self_attention_of_weights_from_outside_is_self_attention():
    model = Sums()
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    with record(model) as recording:
        torch.func.functional_call(model, weights, torch.randn(1, 3, 8))
    assert [call.kind for call in recording.calls] == ["self"]


class Unlike(nn.Module):
    """Attention to a memory whose scores have no formula of queries and keys."""

    def __init__(self, weigh):
        super().__init__()
        self.q, self.k, self.weigh = nn.Linear(8, 8), nn.Linear(8, 8), weigh

    def forward(self, x, memory):
        return self.weigh(self.q(x), self.k(memory)) @ memory


UNLIKE = {
    "scores that a sine bends": lambda q, k: (q @ k.mT).sin().softmax(-1),
    "distances": lambda q, k: (-torch.cdist(q, k)).softmax(-1),
    "a network of pairs": lambda q, k: (q[:, :, None] + k[:, None]).tanh().sum(-1).softmax(-1),
    "products summed entry by entry": lambda q, k: (q[:, :, None] * k[:, None]).sum(-1).softmax(-1),
    "in an order": lambda q, k: (q @ k.mT).flip(-1).flip(-1).sin().softmax(-1),
}


@pytest.mark.parametrize("weigh", UNLIKE.values(), ids=list(UNLIKE))
def test_weights_that_are_stored_as_they_are_have_a_kind_too(weigh):
    model, x, memory = Unlike(weigh), torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    with record(model) as recording:
        model(x, x)
        model(x, memory)
    assert [call.kind for call in recording.calls] == ["self", "cross"]


class Types(nn.Module):
    """Attention of latents over tokens, whose queries have the dtype of the keys, which are more."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, latents, x):
        k, v = self.to_kv(x).chunk(2, dim=-1)
        return F.scaled_dot_product_attention(self.to_q(latents).type_as(k)[:, None], k[:, None], v[:, None])


def test_a_tensor_that_states_a_dtype_is_not_where_queries_come_from():
    with record(model := Types()) as recording:
        model(torch.randn(1, 3, 8), torch.randn(1, 7, 8))
    assert [call.kind for call in recording.calls] == ["cross"]


class Perceptron(nn.Module):
    """Two layers whose weights are parameters of its own, or those of a list."""

    def __init__(self, in_list):
        super().__init__()
        weights = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8))
        self.one, self.other = (None, None) if in_list else weights
        self.weights = nn.ParameterList(weights if in_list else ())

    def forward(self, x):
        one, other = self.weights or (self.one, self.other)
        return F.gelu(x @ one) @ other


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_weights_from_outside_are_no_keys_and_values(is_mapped, in_list):
    model, x = nn.Sequential(Perceptron(in_list)), torch.randn(2, 3, 8)
    weights = {name: one.detach().expand(2, -1, -1).clone() for name, one in model.named_parameters()}
    with record(model) as recording:
        if is_mapped:
            torch.func.vmap(lambda own, row: torch.func.functional_call(model, own, row))(weights, x)
        else:
            torch.func.functional_call(model, {name: one[0] for name, one in weights.items()}, x)
    assert not recording.runs
    assert not recording.missed
