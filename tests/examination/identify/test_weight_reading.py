import math

import pytest
import torch

from examination.identify.cases import case_of, make_layer
from examination.identify.functions import attention, draw_grouped_inputs
from examination.identify.layers import C, Plain, make_later_table
from regard.examination.identify.weight_reading import find_head_width, is_weighted_sum, measure_slope, read_function_weights

D = 8


class Shown(Plain):
    """A layer whose residual hides what it computes, and which returns its weights."""

    def forward(self, x):
        q, k, v = self.split(*self.roles(x))
        weights = self.weights(q, k, *x.shape[:2])
        return x + self.out(self.join(self.mix(weights, v))), weights


def test_the_weights_of_a_function_are_read_with_the_identity_as_values():
    case = case_of(attention(cap=3.0), sample=draw_grouped_inputs()).double
    q, k, v = case.make_usual_inputs()
    found = read_function_weights(case, (q, k, v))
    scores = q @ k.repeat_interleave(3, 1).mT / math.sqrt(D)
    meant = (3 * (scores / 3).tanh()).masked_fill(make_later_table(5), -torch.inf).softmax(-1)
    torch.testing.assert_close(found, meant)
    assert is_weighted_sum(case, found, (q, k, v))


def test_a_function_that_is_not_linear_in_v_has_no_weights_to_read():
    case = case_of(lambda q, k, v: attention()(q, k, v**2)).double
    assert not is_weighted_sum(case, read_function_weights(case, case.make_usual_inputs()), case.make_usual_inputs())


@pytest.mark.slow
def test_a_layer_that_returns_its_weights_shows_its_scale_beside_a_residual():
    case = case_of(make_layer(Shown))
    assert case.match is None
    assert find_head_width(case) == C // 3
    assert measure_slope(case).along == pytest.approx(1 / math.sqrt(C // 3), rel=1e-6)
