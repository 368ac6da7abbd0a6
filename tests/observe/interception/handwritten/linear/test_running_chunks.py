"""Causal linear attention in chunks, each of which adds the last sums of the one before to its own, is recorded as one call."""

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.recording_checks import assert_equal, record_and_compare
from regard.observe.interception.handwritten.linear import chunk_loops, linear_contexts
from regard.observe.interception.handwritten.linear.chunk_loops import UNJOINED
from regard.observe.interception.handwritten.linear.running_chunks import UNCHANGED

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D, C = 2, 3, 7, 4, 12
EPS = 1e-2


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, count: int, start=0, keep=lambda sums: sums[:, :, -1:]) -> Tensor:
    """causal_linear_attention_noncuda of performer-pytorch. https://arxiv.org/abs/2009.14794"""
    last_keys, last_context, outs = start, start, []
    for own, keys, values in zip(*(x.chunk(count, dim=-2) for x in (q, k, v)), strict=True):
        sums = last_keys + keys.cumsum(dim=-2)
        inverse = 1.0 / torch.einsum("...nd,...nd->...n", own, sums.type_as(own) + EPS)
        context = last_context + torch.einsum("...nd,...ne->...nde", keys, values).cumsum(dim=-3)
        outs.append(torch.einsum("...nde,...nd,...n->...ne", context, own, inverse))
        last_keys, last_context = sums[:, :, -1:], keep(context)
    return torch.cat(outs, dim=-2)


def attend_without_division(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    last, outs = torch.zeros(B, H, 1, D, D), []
    for own, keys, values in zip(*(x.chunk(count, dim=-2) for x in (q, k, v)), strict=True):
        context = (keys.unsqueeze(-1) * values.unsqueeze(-2)).cumsum(2) + last
        outs.append((own.unsqueeze(-2) @ context).squeeze(-2))
        last = context.narrow(2, context.shape[2] - 1, 1)
    return torch.cat(outs, dim=-2)


class Performer(nn.Module):
    """Linear attention with positive features of queries and keys."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.project, self.attend = nn.Linear(C, 3 * C), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, self.v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        self.q, self.k = q.softmax(-1), k.exp()
        self.context = self.attend(self.q, self.k, self.v)
        return self.context.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("count", [1, 2, 3, T])
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("divides", [True, False])
def test_chunks_are_one_causal_map(divides, has_gradients, count):
    attend = attend_in_chunks if divides else attend_without_division
    part = Performer(lambda q, k, v: attend(q, k, v, count))
    with torch.set_grad_enabled(has_gradients):
        recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)), keep="values")
    (call,) = recording.calls
    q, k, v = (x.detach() for x in (part.q, part.k, part.v))
    divisor = torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(2) + EPS) if divides else torch.ones(B, H, T)
    assert_equal(call.map.dense(), (q @ k.mT).tril() / divisor.unsqueeze(-1))
    assert_equal(recording.values(0, kind="implicit"), v)
    assert_equal(call.map @ v, part.context.detach())


def test_every_layer_of_chunks_is_recorded():
    layers = [Performer(lambda q, k, v: attend_in_chunks(q, k, v, 3)) for _ in range(3)]
    recording, _ = record_and_compare(nn.Sequential(*layers), lambda m: m(torch.randn(B, T, C)))
    assert [call.name for call in recording.calls] == ["0", "1", "2"]
    for call, layer in zip(recording.calls, layers, strict=True):
        assert_equal(call.map @ layer.v.detach(), layer.context.detach())


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (lambda sums: sums[:, :, :1], "its formula differs from its output"),
        (lambda sums: 0.5 * sums[:, :, -1:], UNJOINED),
    ],
    ids=["the first sums", "half the last sums"],
)
def test_chunks_to_which_something_else_is_added_are_missed(keep, reason):
    part = Performer(lambda q, k, v: attend_in_chunks(q, k, v, 3, keep=keep))
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert any(one.reason.startswith(reason) for one in recording.missed)


def test_chunks_to_which_nothing_is_added_have_maps_of_their_own():
    part = Performer(lambda q, k, v: attend_in_chunks(q, k, v, 3, keep=lambda sums: 0))
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, C)))
    parts = zip(part.v.detach().chunk(3, 2), part.context.detach().chunk(3, 2), recording.calls, strict=True)
    for v, context, call in parts:
        assert_equal(call.map @ v, context)


def test_chunks_that_an_intervention_should_change_stay_with_a_warning():
    model, x = nn.Sequential(Performer(lambda q, k, v: attend_in_chunks(q, k, v, 3))), torch.randn(B, T, C)
    plain = model(x)
    change = regard.KnockOut(layer=0, kind="implicit")
    with torch.no_grad(), pytest.warns(UserWarning, match=UNCHANGED), regard.intervene(model, change):
        assert torch.equal(model(x), plain)


def run_out_of_memory(*_: object) -> None:
    raise torch.cuda.OutOfMemoryError("no memory is left")


@pytest.mark.parametrize("name", ["join_running_chunks", "LinearContexts.add_activated_call"])
def test_an_error_while_calls_are_kept_or_joined_is_reported_and_leaves_the_output(name, monkeypatch):
    class Activated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).relu() @ x

    is_joined = name == "join_running_chunks"
    part = Performer(lambda q, k, v: attend_in_chunks(q, k, v, 3)) if is_joined else Activated()
    module = chunk_loops if is_joined else linear_contexts
    monkeypatch.setattr(f"{module.__name__}.{name}", run_out_of_memory)
    recording, _ = record_and_compare(nn.Sequential(nn.Linear(C, C), part), lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert [(one.module, "no memory is left" in one.reason) for one in recording.missed] == [("1", True)]
