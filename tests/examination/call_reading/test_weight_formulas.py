"""Weights that are a function of scores other than a softmax are named, and those of designs without a softmax are not."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from examination.wrong_calls import D, Rotary
from regard.examination import examine
from regard.examination.call_reading.weight_formulas import explain_weights

T, WIDTH = 7, 5
WAYS = {
    "there is no softmax": lambda scores, seen: scores * seen,
    "a sigmoid of each score": lambda scores, seen: scores.sigmoid() * seen,
    "divided by their sum": lambda scores, seen: scores * seen / (scores * seen).sum(-1, keepdim=True),
    "sum of their absolute values": lambda scores, seen: F.normalize(scores * seen, p=1, dim=-1),
    "length of their row": lambda scores, seen: F.normalize(scores * seen, dim=-1),
}
DESIGNS = {
    "sigmoid attention": lambda scores, seen: (scores - torch.tensor(T).log()).sigmoid() * seen,
    "retention": lambda scores, seen: scores * seen * 0.9 ** torch.arange(T).sub(torch.arange(T)[:, None]).abs(),
    "linear attention": lambda scores, seen: scores.exp() * seen / (scores.exp() * seen).sum(-1, keepdim=True),
    "squared relu": lambda scores, seen: scores.relu().square() * seen / T,
    "another scale": lambda scores, seen: scores * seen / T,
    "silu": lambda scores, seen: F.silu(scores) * seen,
}


@given(way=st.sampled_from([*WAYS, *DESIGNS]), hides=st.booleans(), seed=st.integers(0, 99))
def test_the_function_of_scores_that_makes_weights_is_read(way, hides, seed):
    products = torch.randn(2, 3, T, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    seen = torch.ones(T, T, dtype=torch.bool)
    weights = {**WAYS, **DESIGNS}[way](products / WIDTH**0.5, seen.tril() if hides else seen)
    found = explain_weights(weights, [products, torch.ones(2, 3)], WIDTH)
    assert (way in found) if way in WAYS else not found


def hide(weights):
    return weights.tril()


class WithoutSoftmax(Rotary):
    """Weights by hand, of scores beside rotary positions."""

    def __init__(self, make_weights):
        super().__init__()
        self.make_weights = make_weights

    def attend(self, q, k, v):
        return self.make_weights(q @ k.mT / D**0.5) @ v


MISTAKES = {"there is no softmax": hide, "a sigmoid of each score": lambda scores: hide(scores.sigmoid())}
RIGHT = {
    "sigmoid attention": lambda scores: hide((scores - 2).sigmoid()),
    "relu attention": lambda scores: hide(scores.relu() / scores.shape[-1]),
    "a kernel of scores": lambda scores: hide(1 + scores.square()) / hide(1 + scores.square()).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("does", MISTAKES)
def test_a_layer_without_a_softmax_is_named(does):
    torch.manual_seed(0)
    (finding, *_) = examine(WithoutSoftmax(MISTAKES[does])).findings
    assert finding.kind == "not normalised"
    assert does in finding.evidence
    assert "torch.softmax(scores, dim=-1)" in finding.cure


@pytest.mark.parametrize("design", RIGHT)
def test_nothing_is_found_of_a_design_without_a_softmax(design):
    torch.manual_seed(0)
    assert not examine(WithoutSoftmax(RIGHT[design])).findings


LATE = {
    "-1e+09": lambda scores: scores.softmax(-1).masked_fill(torch.ones_like(scores).triu(1).bool(), -1e9),
    "-1e+04": lambda scores: scores.softmax(-1) - 1e4 * torch.ones_like(scores).triu(1),
}


@pytest.mark.parametrize("number", LATE)
def test_large_numbers_that_hide_keys_after_the_softmax_are_named_first(number):
    torch.manual_seed(0)
    (finding, *_) = examine(WithoutSoftmax(LATE[number])).findings
    assert finding.kind == "not normalised"
    assert f"hidden after the softmax: their weights are about {number}" in finding.evidence
    assert "Hide keys with -inf before the softmax" in finding.cure


def test_a_layer_that_refuses_other_values_is_examined_all_the_same():
    class Refusing(WithoutSoftmax):
        def attend(self, q, k, v):
            if bool((v[:, :, 0] == 0).all()):
                raise ValueError("values are zero")
            return super().attend(q, k, v)

    torch.manual_seed(0)
    report = examine(Refusing(MISTAKES["there is no softmax"]))
    assert "raises" not in [one.kind for one in report.findings]
    assert report.unknown
