"""Loops over blocks of keys: an online softmax is missed, and an intervention warns of it."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import regard
from observe.interception.handwritten.handwritten_attention import CAUSAL, B, C, Own, T, scores
from observe.recording_checks import record_and_compare
from regard.observe.interception.handwritten.handwritten_call import BLOCKS

pytestmark = pytest.mark.usefixtures("in_float64")


def compute_online_softmax(q: Tensor, k: Tensor, v: Tensor, take_maximum, size: int = 2, is_causal: bool = False) -> Tensor:
    """Sum over blocks of keys with a running maximum and running sums, as flash attention does."""
    largest, sums = torch.full((*q.shape[:3], 1), -1e30), torch.zeros(*q.shape[:3], 1)
    context = torch.zeros_like(v)
    for start in range(0, T, size):
        block = slice(start, start + size)
        part = scores(q, k[:, :, block])
        part = part.masked_fill(~CAUSAL[:, block], -torch.inf) if is_causal else part
        new = take_maximum(largest, part.amax(-1, keepdim=True))
        weights, decay = (part - new).exp(), (largest - new).exp()
        sums, context, largest = sums * decay + weights.sum(-1, keepdim=True), context * decay + weights @ v[:, :, block], new
    return context / sums


LOOPS = {
    "torch.maximum": lambda q, k, v: compute_online_softmax(q, k, v, torch.maximum),
    "torch.max": lambda q, k, v: compute_online_softmax(q, k, v, torch.max),
    "causal": lambda q, k, v: compute_online_softmax(q, k, v, torch.maximum, is_causal=True),
    "one block": lambda q, k, v: compute_online_softmax(q, k, v, torch.maximum, size=T),
}


@pytest.mark.parametrize("form", LOOPS.values(), ids=LOOPS)
def test_an_online_softmax_is_missed_and_an_intervention_says_that_it_has_no_effect(form):
    model = nn.Sequential(Own(form))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert {one.reason for one in recording.missed} == {BLOCKS}
    told = pytest.warns(UserWarning, match="KnockOut of layer 0 was not applied: 0: its exponentials are shifted by a running")
    with torch.no_grad(), told, regard.intervene(model, regard.KnockOut(layer=0)):
        model(torch.randn(B, T, C))


@pytest.mark.parametrize("take_maximum", [lambda s: s.amax(-1, keepdim=True), lambda s: s.max(-1, keepdim=True)[0]])
def test_a_softmax_that_is_shifted_by_the_maximum_of_its_rows_is_recorded(take_maximum):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (scores(q, k) - take_maximum(scores(q, k))).exp()
        return (weights @ v) / weights.sum(-1, keepdim=True)

    model = nn.Sequential(Own(attend))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert len(recording.calls) == 1


def test_an_intervention_warns_of_calls_of_a_changed_module_that_are_missed():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q, k).softmax(-1) @ v + LOOPS["causal"](q, k, v)

    model = nn.Sequential(Own(attend))
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with regard.intervene(model, regard.KnockOut(layer=0)):
            model(torch.randn(B, T, C))
    assert [str(one.message) for one in said] == [f"A part of the output of 0 was not changed: {BLOCKS}."]
