"""A case asks the subject, and measures once."""

import copy
import threading

import pytest
import torch

from bounds import EXPONENTIAL, assert_within, estimate_rounding
from examination.subjects import D_IN, D_OUT, Layer, case_of, hiding, later
from regard import Causal, MultiHeadAttention, Window, attention


def causal(q, k, v):
    return attention(q, k, v, Causal())


def test_the_double_gives_what_the_subject_gives_to_rounding():
    layer = MultiHeadAttention(12, 12, 13, 0.5, 3).eval()
    case = case_of(layer)
    (x,) = case.double.make_usual_inputs()
    found = case.double.run_subject(x).context
    assert found.dtype == torch.float64
    with torch.no_grad():
        terms = 12 + x.shape[1] + EXPONENTIAL  # of a projection and a softmax
        rounding = estimate_rounding(copy.deepcopy(layer).double(), lambda one: one(x), terms)
    assert_within(case.run_subject(*case.make_usual_inputs()).context, found, rounding)


class Narrow(Layer):
    def forward(self, x):
        assert x.dtype == torch.float32
        return super().forward(x)


class Uncopied(Layer):
    def __init__(self):
        super().__init__(hiding(later))
        self.lock = threading.Lock()


@pytest.mark.parametrize("layer", [Narrow(hiding(later)), Uncopied()])
def test_what_does_not_run_in_float64_has_no_double_and_is_measured_all_the_same(layer):
    case = case_of(layer)
    assert case.double is None
    assert torch.equal(case.measured_dependency.visible, case.get_expected_visibility(*case.make_usual_inputs()))


def test_what_is_expected_has_an_entry_for_every_sequence_query_and_key():
    case = case_of(causal, Causal() & Window(left=1), offset=2)
    q, k, v = case.make_usual_inputs()
    assert torch.equal(case.get_expected_visibility(q, k, v), (Causal() & Window(left=1)).table(4, 6, 2).expand(2, 4, 6))


def test_what_is_measured_is_measured_once():
    asked = []

    class Counted(Layer):
        def forward(self, x):
            asked.append(1)
            return super().forward(x)

    case = case_of(Counted(hiding(later), D_IN, D_OUT))
    first, count = case.measured_dependency, len(asked)
    assert case.measured_dependency is first
    assert len(asked) == count
