"""Scores that are too large for a softmax or for a mask are found."""

import pytest
import torch

from examination import wrong_softmax as wrong
from examination.subjects import D_IN, Layer, case_of, hiding, kinds, later
from regard.examination.identify.match import identify_formula
from regard.examination.probes.overflow import check_case


def case(layer, dtype=torch.float32, **told):
    """A case that knows its scores, as examine makes it."""
    made = case_of(layer.to(dtype) if isinstance(layer, torch.nn.Module) else layer, **told)
    made._identify = identify_formula
    return made


def divide_exponentials(scores):
    """No maximum is taken away."""
    numbers = scores.masked_fill(later(*scores.shape[-2:]), -torch.inf).exp()
    return numbers / numbers.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_exp_without_the_maximum_is_found_in_every_dtype(dtype):
    (finding,) = check_case(case(Layer(divide_exponentials), dtype))
    assert finding.kind == "overflow"
    assert "NaN" in finding.evidence


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_softmax_that_takes_it_away_is_no_finding(dtype):
    assert kinds(check_case(case(Layer(hiding(later)), dtype))) == []


class AfterNorm(torch.nn.Module):
    """A layer after a norm, whose outputs have one size whatever the size of its inputs."""

    def __init__(self, layer):
        super().__init__()
        self.norm, self.layer = torch.nn.LayerNorm(D_IN), layer

    def forward(self, x):
        return self.layer(self.norm(x))


@pytest.mark.parametrize(
    ("weigh", "found"), [(divide_exponentials, ["overflow"]), (hiding(later, -1e3), ["overflow"]), (hiding(later), [])]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_large_scores_are_made_after_a_norm_too_and_its_weights_are_left_as_they_were(weigh, found, dtype):
    layer = AfterNorm(Layer(weigh)).to(dtype)
    before = layer.norm.weight.detach().clone()
    assert kinds(check_case(case_of(layer))) == found
    assert torch.equal(layer.norm.weight, before)


def test_a_function_that_overflows_is_found():
    (finding,) = check_case(case(wrong.exp_overflows))
    assert finding.kind == "overflow"


@pytest.mark.parametrize("seed", range(20))
def test_a_number_for_minus_infinity_is_found_whatever_the_weights_are(seed):
    layer = Layer(hiding(later, -1e4))
    torch.manual_seed(seed)
    for projection in (layer.W_query, layer.W_key, layer.W_value):
        projection.reset_parameters()
    assert kinds(check_case(case(layer))) == ["overflow"]


@pytest.mark.parametrize(
    ("value", "found"), [(-1e3, True), (-1e4, True), (-1e9, False), (torch.finfo(torch.float32).min, False)]
)
def test_a_number_for_minus_infinity_is_judged_by_scores_of_ten_thousand(value, found):
    said = list(check_case(case(Layer(hiding(later, value)))))
    assert kinds(said) == (["overflow"] if found else [])
    if found:
        assert "which is hidden" in said[0].evidence
        assert said[0].evidence.endswith("it stays hidden")  # with fewer: how near that is to scores in use
        assert "-torch.inf" in said[0].cure
