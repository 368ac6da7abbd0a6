"""Numbers that are rounded to fewer bits than they came in are found; half precision as such is no fault."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examination import right_designs as designs
from examination import wrong_softmax as wrong
from examination.subjects import Layer, case_of, hiding, kinds, later
from regard import Everything, layers
from regard.examination.probes.precision import check_case

weigh = hiding(later)


class Inside(Layer):
    """Scores, weights or values go through another dtype."""

    def __init__(self, where, dtype):
        super().__init__(weigh)
        self.where, self.inner = where, dtype

    def forward(self, x):
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        weights = weigh(self.through("scores", q @ k.mT / q.shape[-1] ** 0.5))
        return self.through("weights", weights) @ self.through("values", v)

    def through(self, where, x):
        return x.to(self.inner).to(x.dtype) if where == self.where else x


@pytest.mark.parametrize("where", ["scores", "weights", "values"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inside_a_layer_is_found(where, dtype):
    (finding,) = check_case(case_of(Inside(where, dtype)))
    assert finding.kind == "wrong precision"
    assert "fewer bits" in finding.evidence


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layer",
    [lambda: Layer(weigh), lambda: layers.MultiHeadAttention(14, 30, 17, 0.0, 5), lambda: nn.MultiheadAttention(12, 3)],
)
def test_a_right_layer_is_no_finding_in_any_dtype(layer, dtype):
    said = list(check_case(case_of(layer().to(dtype))))
    assert kinds(said) == []
    assert said


def test_sums_in_half_precision_are_found():
    torch.manual_seed(0)
    (finding,) = check_case(case_of(wrong.HalfSums()))
    assert finding.kind == "wrong precision"
    assert "300 tokens" in finding.evidence
    assert "bfloat16" in finding.evidence


def test_a_function_that_rounds_is_found():
    def rounding(q, k, v):
        return F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q.dtype)

    (finding,) = check_case(case_of(rounding, Everything()))
    assert finding.kind == "wrong precision"


def test_what_autocast_gives_is_held_against_its_own_dtype():
    (checked,) = check_case(case_of(designs.Autocast()))
    assert "bfloat16" in checked.what
