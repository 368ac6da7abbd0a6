"""Who sees whom, as it is measured, is who sees whom."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examination.subjects import D_IN, Layer, Residual, case_of, hiding, later, make_hidden_table
from regard import Causal, Documents, Everything, Given, Padding, Prefix, Window, attention
from regard.examination import dependency

RULES = [
    Everything(),
    Causal(),
    Causal() & Window(left=2),
    Window(1, 2),
    Causal() | Prefix(3),
    Padding((3, 5)),
    Causal() & Documents([0, 0, 1, 1, 2, 2, 2]),
    Causal() & ~Window(0, 0),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_what_is_found_of_a_function_is_its_rule(rule):
    case = case_of(lambda q, k, v: attention(q, k, v, rule), rule)
    assert torch.equal(case.measured_dependency.visible, case.get_expected_visibility(*case.make_usual_inputs()))


@settings(max_examples=10)
@given(st.lists(st.booleans(), min_size=25, max_size=25))
def test_any_table_is_found(seen):
    table = torch.tensor(seen).view(5, 5)
    case = case_of(lambda q, k, v: attention(q, k, v, Given(table)), Given(table))
    assert torch.equal(case.measured_dependency.visible, table.expand(2, 5, 5))


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.table(7, 7).diagonal(dim1=-2, dim2=-1).all()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_found_of_a_layer_is_its_rule(rule, dtype):
    sample = torch.randn(2, 7, D_IN)
    case = case_of(Layer(hiding(make_hidden_table(rule))).to(dtype), rule, sample)
    assert torch.equal(case.measured_dependency.visible, case.get_expected_visibility(*case.make_usual_inputs()))


@pytest.mark.parametrize("value", [-5.0, -10.0, -20.0])
def test_a_mask_that_is_finite_and_too_small_leaks(value):
    found = case_of(Layer(hiding(later, value))).measured_dependency.visible
    assert found.all()


def test_masking_after_the_softmax_and_dividing_by_the_sum_is_no_leak():
    def mask_and_renormalize(scores):
        weights = scores.softmax(-1).tril()
        return weights / weights.sum(-1, keepdim=True)

    case = case_of(Layer(mask_and_renormalize))
    assert torch.equal(case.measured_dependency.visible, case.get_expected_visibility(*case.make_usual_inputs()))


def test_sequences_that_see_one_another_are_found():
    class Mixed(Layer):
        def forward(self, x):
            return super().forward(x) + x[:1, :, :5]

    across = case_of(Mixed(hiding(later))).measured_dependency.across_sequences
    assert across[1, 0] > 0.01
    assert across[0, 1] == 0


def own(layer, expects=None):
    return case_of(layer, expects or Everything()).measured_dependency.passes_own_value


def unseen(scores):
    return scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), -torch.inf).softmax(-1)


def test_attention_that_passes_on_its_own_token_is_distinguished_from_attention_that_does_not():
    assert own(Layer(lambda scores: scores.softmax(-1))) is True
    assert own(Layer(hiding(later)), Causal()) is True
    assert own(Layer(unseen)) is False


@pytest.mark.parametrize("weights", [lambda scores: scores.softmax(-1), unseen])
def test_beside_a_residual_it_cannot_be_determined(weights):
    assert own(Residual(weights)) is None


@pytest.mark.parametrize("is_causal", [True, False])
def test_pairs_without_weight_for_some_inputs_are_seen_in_others(is_causal):
    """The weights of a squared ReLU are exactly 0 for half of all scores."""
    torch.manual_seed(3)
    w = torch.randn(3, 5, 5, dtype=torch.float64)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril() if is_causal else torch.ones(7, 7, dtype=torch.bool)

    def compute(x):
        q, k, v = (x @ each for each in w)
        return ((q @ k.mT).relu().square() * allowed) @ v

    make = lambda seed, size: (size * torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(seed)).double(),)  # noqa: E731
    strength = dependency.measure_by_gradient(compute, make, range(7))
    for b in range(2):
        assert torch.equal(strength[b, :, b] > 1e-11, allowed)
