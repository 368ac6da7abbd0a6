"""Loops over keys, one by one: an online softmax, a sum of exponentials, or the columns of a softmax times the values."""

import math

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.interception.handwritten.handwritten_attention import CAUSAL, B, C, D, H, Own, T
from observe.recording_checks import assert_equal, compute_weights, record_and_compare
from regard.observe.interception.handwritten.handwritten_call import UNFOLLOWED
from regard.observe.interception.handwritten.softmax.joined_blocks import UNORDERED
from regard.observe.interception.handwritten.softmax.key_blocks import BLOCKS, KEYS, OTHERWISE

pytestmark = pytest.mark.usefixtures("in_float64")
SCALE = math.sqrt(D)


def add_up_online(q: Tensor, k: Tensor, v: Tensor, rescales: bool = True) -> Tensor:
    """An online softmax with a running maximum, of all queries at once."""
    largest, total, context = torch.full((*q.shape[:-1], 1), -torch.inf), 0, torch.zeros_like(v)
    for j in range(T):
        score = (q * k[..., j : j + 1, :]).sum(-1, keepdim=True) / SCALE
        new = torch.maximum(largest, score)
        weight, decay = (score - new).exp(), (largest - new).exp()
        total = total * decay + weight
        context, largest = (context * decay if rescales else context) + weight * v[..., j : j + 1, :], new
    return context / total


def add_up_picked_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    largest, total, context = torch.full(q.shape[:-1], -torch.inf), torch.zeros(q.shape[:-1]), torch.zeros_like(v)
    for j in range(T):
        score = torch.einsum("...td,...d->...t", q, k[..., j, :]) / SCALE
        new = torch.maximum(largest, score)
        weight, decay = (score - new).exp(), (largest - new).exp()
        total, largest = total * decay + weight, new
        context = context * decay[..., None] + weight[..., None] * v[..., j, :].unsqueeze(-2)
    return context / total[..., None]


def add_up_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    total = context = 0
    for key, value in zip(k.unbind(-2), v.unbind(-2), strict=True):
        weight = (q @ key.unsqueeze(-1) / SCALE).exp()
        total, context = total + weight, context + weight * value.unsqueeze(-2)
    return context / total


def add_up_some_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every second key, which are not side by side."""
    total = context = 0
    for j in range(0, T, 2):
        weight = ((q * k[..., j : j + 1, :]).sum(-1, keepdim=True) / SCALE).exp()
        total, context = total + weight, context + weight * v[..., j : j + 1, :]
    return context / total


def loop_over_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loop over queries, and over the keys up to each."""
    contexts = []
    for i in range(T):
        largest, total = torch.full((*q.shape[:-2], 1), -torch.inf), torch.zeros(*q.shape[:-2], 1)
        context = torch.zeros_like(v[..., 0, :])
        for j in range(i + 1):
            score = (q[..., i, :] * k[..., j, :]).sum(-1, keepdim=True) / SCALE
            new = torch.maximum(largest, score)
            weight, decay = (score - new).exp(), (largest - new).exp()
            total, context, largest = total * decay + weight, context * decay + weight * v[..., j, :], new
        contexts.append(context / total)
    return torch.stack(contexts, -2)


def add_up_columns(q: Tensor, k: Tensor, v: Tensor, keys: tuple[int, ...] = (*range(T),)) -> Tensor:
    """A softmax of all scores, in a loop over keys and in a second one over values."""
    weights = torch.stack([(q * k[..., j : j + 1, :]).sum(-1) / SCALE for j in range(T)], -1).softmax(-1)
    return sum(weights[..., j, None] * v[..., j : j + 1, :] for j in keys)


def add_up_columns_of_a_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights, context = (q @ k.mT / SCALE).softmax(-1), torch.zeros_like(v)
    for weight, value in zip(weights.unbind(-1), v.unbind(-2), strict=True):
        context += weight.unsqueeze(-1) * value.unsqueeze(-2)
    return context


def add_columns_to_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights, context = (q @ k.mT / SCALE).softmax(-1), v
    for j in range(T):
        context = context + weights[..., j, None] * v[..., j : j + 1, :]
    return context


FORMS = {
    add_up_online: None,
    add_up_picked_keys: None,
    add_up_exponentials: None,
    loop_over_pairs: CAUSAL,
    add_up_columns: None,
    add_up_columns_of_a_product: None,
}


class Given(nn.Module):
    """A form of queries, keys and values that it is called with."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form = form

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.form(q, k, v)


@pytest.mark.parametrize("lead", [(B, H), (1, H), (B, 1), ()])
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_loop_over_keys_of_arguments_is_recorded_as_one_call(form, has_gradients, lead):
    q, k, v = torch.randn(3, *lead, T, D)
    with torch.set_grad_enabled(has_gradients):
        recording, context = record_and_compare(nn.Sequential(Given(form)), lambda m: m[0](q, k, v), keep="values")
    assert len(recording.calls) == 1
    found, expected = recording.map(0), compute_weights(q, k, FORMS[form]).view(*(*lead, 1, 1)[:2], T, T)
    assert found.shape == expected.shape
    assert_equal(found.dense(), expected)
    assert_equal((found.dense() @ recording.values(0)).view(context.shape), context)
    assert not [one for one in recording.notes if "stored as they are" not in one]


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_layer_with_a_loop_over_keys_is_recorded(form, has_gradients):
    layers = [Own(lambda q, k, v: form(q, k, v).transpose(1, 2).flatten(2)) for _ in range(2)]
    with torch.set_grad_enabled(has_gradients):
        recording, _ = record_and_compare(nn.Sequential(*layers), lambda m: m(torch.randn(B, T, C)), keep="values")
    assert [(call.name, call.map.shape) for call in recording.calls] == [(name, (B, H, T, T)) for name in "01"]
    for n, layer in enumerate(layers):
        assert_equal(recording.values(n), layer.values)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (lambda q, k, v: add_up_online(q, k, v, rescales=False), OTHERWISE),
        (add_up_some_exponentials, UNORDERED.format("keys")),
        (lambda q, k, v: add_up_columns(q, k, v, (0, 1, 3)), UNFOLLOWED),
        (lambda q, k, v: add_up_columns(q, k, v, (0, 1, 1, 2, 3, 4)), UNFOLLOWED),
        (add_columns_to_tokens, UNFOLLOWED),
    ],
    ids=["not rescaled", "every second key", "some columns", "a column twice", "added to tokens"],
)
def test_a_loop_over_keys_that_is_no_softmax_over_all_of_them_is_missed(form, reason):
    recording, _ = record_and_compare(nn.Sequential(Own(form)), lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert {one.reason for one in recording.missed} == {reason}


def test_exponentials_of_a_token_and_one_key_that_nothing_adds_up_are_no_attention():
    def gate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q * k[..., :1, :]).sum(-1, keepdim=True).exp() * v[..., :1, :]

    recording, _ = record_and_compare(nn.Sequential(Own(gate)), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls


def test_a_query_that_sees_a_single_key_has_a_row():
    def grow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [(q[..., i : i + 1, :] * k[..., : i + 1, :]).sum(-1).softmax(-1) for i in range(T)]
        return torch.stack([(row[..., None] * v[..., : i + 1, :]).sum(-2) for i, row in enumerate(rows)], -2)

    recording, _ = record_and_compare(nn.Sequential(Own(grow)), lambda m: m(torch.randn(B, T, C)))
    assert [call.map.shape for call in recording.calls] == [(B, H, 1, n) for n in range(1, T + 1)]


@pytest.mark.parametrize(("form", "reason"), [(add_up_online, BLOCKS), (add_up_exponentials, KEYS)])
def test_a_loop_over_keys_that_an_intervention_should_change_stays_with_a_warning(form, reason):
    model, x = nn.Sequential(Own(form)), torch.randn(B, T, C)
    plain = model(x)
    told = pytest.warns(UserWarning, match=f"KnockOut of layer 0 was not applied: 0: {reason[:40]}")
    with torch.no_grad(), told, regard.intervene(model, regard.KnockOut(layer=0)):
        assert torch.equal(model(x), plain)
