"""Scores that are too large for a softmax or for a mask are found."""

import functools

import pytest
import torch
import torch.nn.functional as F

from examination import wrong_softmax as wrong
from examination.subjects import D_IN, D_OUT, Layer, case_of, hiding, kinds, later
from regard import Causal, Everything
from regard.examination.identify.match import identify_formula
from regard.examination.probes.overflow import check_case, draw_unhidden_token


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


class AfterFunction(torch.nn.Module):
    """A layer after a norm without weights, or with some in a module of another name."""

    def __init__(self, layer, norm):
        super().__init__()
        self.scaler, self.layer, self.norm = Scaler(), layer, norm

    def forward(self, x):
        return x[..., :1] + self.layer(self.scaler(x) if self.norm is None else self.norm(x))


class Scaler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(D_IN))

    def forward(self, x):
        return x * self.gain * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


NORMS = [
    None,
    torch.nn.LayerNorm(D_IN, elementwise_affine=False),
    torch.nn.RMSNorm(D_IN, elementwise_affine=False),
    lambda x: F.rms_norm(x, (D_IN,)),
    lambda x: F.normalize(x, dim=-1),
    lambda x: x / x.norm(dim=-1, keepdim=True),
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("weigh", "found"), [(divide_exponentials, ["overflow"]), (hiding(later, -1e3), ["overflow"]), (hiding(later), [])]
)
def test_large_scores_are_made_after_any_norm_by_the_weights_of_projections(norm, weigh, found):
    layer = AfterFunction(Layer(weigh), norm)
    before = layer.layer.W_query.weight.detach().clone()
    said = list(check_case(case_of(layer)))
    assert kinds(said) == found
    words = said[0].evidence if found else said[0].sensitivity
    assert "the weights of layer.W_query and layer.W_key" in words
    assert torch.equal(layer.layer.W_query.weight, before)


class LowRank(torch.nn.Module):
    """A projection plus two matrices in a row, as LoRA has them, or those alone."""

    def __init__(self, has_base):
        super().__init__()
        self.base = torch.nn.Linear(D_IN, D_OUT) if has_base else None
        self.down, self.up = torch.nn.Linear(D_IN, 3, bias=False), torch.nn.Linear(3, D_OUT, bias=False)

    def forward(self, x):
        y = self.up(self.down(x))
        return y if self.base is None else self.base(x) + y


@pytest.mark.parametrize("has_base", [False, True])
@pytest.mark.parametrize(("value", "found"), [(-1e8, []), (-1e3, ["overflow"])])
def test_scores_do_not_grow_by_the_fourth_power_of_two_matrices_in_a_row(value, found, has_base):
    torch.manual_seed(0)
    layer = AfterFunction(Layer(hiding(later, value)), None)
    layer.layer.W_query, layer.layer.W_key = LowRank(has_base), LowRank(has_base)
    before = layer.layer.W_query.down.weight.detach().clone()
    said = list(check_case(case_of(layer)))
    assert kinds(said) == found
    words = said[0].evidence if found else said[0].sensitivity
    assert "layer.W_query.up" in words
    assert "layer.W_query.down" not in words
    assert ("layer.W_query.base" in words or "2 more" in words or "3 more" in words) is has_base
    assert torch.equal(layer.layer.W_query.down.weight, before)


def test_a_mask_that_is_far_below_cosines_is_no_finding_whatever_the_weights_are():
    class Cosines(Layer):
        def forward(self, x):
            q, k = (F.normalize(f(x), dim=-1) for f in (self.W_query, self.W_key))
            return x[..., :1] + self.weights(10 * q @ k.mT) @ self.W_value(x)

    assert kinds(check_case(case_of(Cosines(hiding(later, -100.0))))) == []


def test_a_function_that_overflows_is_found():
    (finding,) = check_case(case(wrong.exp_overflows))
    assert finding.kind == "overflow"


def test_a_function_that_does_not_is_no_finding():
    assert kinds(check_case(case(functools.partial(F.scaled_dot_product_attention, is_causal=True)))) == []


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


def test_a_layer_that_leaks_anyway_is_not_warned_of_its_mask_again():
    assert kinds(check_case(case(Layer(lambda scores: scores.softmax(-1)), expects=Causal()))) == []


def test_rows_that_are_no_numbers_anyway_are_left_to_others():
    assert list(check_case(case(Layer(lambda scores: scores.softmax(-1) * torch.nan), expects=Everything()))) == []


@pytest.mark.parametrize(("t", "draws"), [(8, 256), (32, 256), (100, 26), (320, 2), (600, 0)])
def test_as_many_sequences_are_drawn_as_scores_of_16_heads_have_room(t, draws):
    sizes = []

    class Sized(Layer):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    told = case_of(Sized(hiding(later)), sample=torch.randn(1, t, D_IN))
    draw_unhidden_token(told, 4.0)
    assert max(sizes) == max(draws, 1)


def test_of_many_tokens_some_are_changed():
    calls = []

    class Counted(Layer):
        def forward(self, x):
            calls.append(x.shape[1])
            return super().forward(x)

    assert kinds(check_case(case(Counted(hiding(later)), sample=torch.randn(2, 100, D_IN)))) == []
    assert calls.count(100) < 100
