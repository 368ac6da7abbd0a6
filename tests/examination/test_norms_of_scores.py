"""What is used in place of the softmax is named in layers and in whole models, and softmax1 is a design."""

import math

import pytest
import torch
import torch.nn.functional as F

from examination.whole_models import Blocks
from examination.wrong_calls import D
from examination.wrong_sources import Written
from regard import examine


class Norm(Written):
    """Causal attention by hand without positions; `norm` makes weights of scores and of who is seen."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        del self.slopes, self.inv_freq

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        return self.norm(q @ k.mT / math.sqrt(D), seen) @ v


def add_one(scores, seen):
    """Softmax1, as its author writes it."""
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp_min(0)
    powers = (scores - largest).exp()
    return powers / (powers.sum(-1, keepdim=True) + (-largest).exp())


def divide_by_absolute(scores, seen):
    return F.normalize(scores * seen, p=1, dim=-1)


def square(scores, seen):
    powers = (scores * seen).square()
    return powers / powers.sum(-1, keepdim=True)


def square_weights(scores, seen):
    powers = scores.masked_fill(~seen, -torch.inf).softmax(-1).square()
    return powers / powers.sum(-1, keepdim=True)


def take_absolute(scores, seen):
    powers = (scores * seen).abs()
    return powers / powers.sum(-1, keepdim=True)


def divide_by_length(scores, seen):
    return F.normalize(scores.masked_fill(~seen, -torch.inf).softmax(-1), dim=-1)


WRONG = {
    divide_by_absolute: ("not normalised", "scores are divided by the sum of their absolute values, without exp"),
    square: ("not normalised", "squares of scores are divided by their sum, without exp"),
    square_weights: (
        "wrong scale",
        "the scores are multiplied by 0.8165, twice the expected 0.4082, as where weights are squared",
    ),
    take_absolute: ("not normalised", "absolute values of scores are divided by their sum, without exp"),
    divide_by_length: ("not normalised", "a softmax is divided by its length, the root of the sum of its squares"),
}


@pytest.mark.parametrize(
    ("norm", "in_model"),
    [(norm, in_model) for norm in WRONG for in_model in (False, True) if not (norm is divide_by_absolute and in_model)],
)
def test_what_replaces_the_softmax_is_named(norm, in_model):
    torch.manual_seed(0)
    report = examine(Blocks(lambda: Norm(norm)) if in_model else Norm(norm))
    kind, evidence = WRONG[norm]
    assert [one.kind for one in report.findings] == [kind]
    assert report.findings[0].evidence.removeprefix("blocks.0.attention: ").startswith(evidence)
    assert not [one for one in report.unknown if one.is_required]


def test_a_model_whose_layers_have_no_weights_that_are_recorded_is_inconclusive_and_says_what_to_examine():
    torch.manual_seed(0)
    report = examine(Blocks(lambda: Norm(divide_by_absolute)))
    assert not report
    assert not report.findings
    assert "examine(model.blocks[0].attention)" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("in_model", [False, True])
def test_softmax1_is_a_design(in_model):
    torch.manual_seed(0)
    report = examine(Blocks(lambda: Norm(add_one)) if in_model else Norm(add_one))
    assert report
    assert any("a sink of 0: exp(scores) / (1 + Σ exp(scores))" in one.what for one in report.checked)


@pytest.mark.slow
def test_mistakes_beside_softmax1_in_a_model_are_named():
    def add_one_to_all(scores, seen):
        return add_one(scores, torch.ones_like(seen))

    torch.manual_seed(0)
    assert "future leak" in [one.kind for one in examine(Blocks(lambda: Norm(add_one_to_all))).findings]
    torch.manual_seed(0)
    report = examine(Blocks(lambda: Norm(lambda scores, seen: add_one(scores * math.sqrt(D), seen))))
    assert not report
