"""Rows that are not finite, and rows that see though they may not, are found."""

import pytest
import torch
from torch import nn

from examination.subjects import D_IN, Layer, case_of, hiding, kinds, later, make_hidden_table
from regard import Causal, Given, Padding, Window, attention
from regard.examination.probes.blind import check_case

REAL = torch.arange(7) < torch.tensor((3, 5)).unsqueeze(-1)
STRICT = Causal() & ~Window(0, 0)  # the first query may see nothing


def test_a_row_of_nan_is_found_and_named():
    (finding,) = check_case(case_of(Layer(hiding(lambda q, k: later(q, k, 0)))))
    assert finding.kind == "blind row"
    assert finding.evidence == 'row 0 "Your" is NaN; row 0 may see 1 of 6 tokens'


def test_queries_hidden_in_the_place_of_keys_are_found():
    layer = Layer(hiding(lambda q, k: ~REAL[:, :, None].expand(2, q, k)))
    (finding,) = check_case(case_of(layer, Padding((3, 5)), torch.randn(2, 7, D_IN)))
    assert "rows 3, 4, 5 and 6 are NaN" in finding.evidence
    assert "last axis" in finding.cure


def test_an_output_that_is_nan_throughout_is_reported():
    (finding,) = check_case(case_of(Layer(lambda scores: scores / 0 - scores / 0)))
    assert "every row of the output is NaN" in finding.evidence


def test_weights_that_are_not_finite_are_reported_by_name():
    layer = Layer(hiding(later))
    nn.init.constant_(layer.W_key.weight, torch.nan)
    (finding,) = check_case(case_of(layer))
    assert finding.evidence.startswith("W_key.weight contains NaN")


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
def test_a_row_that_may_see_nothing_and_sees_all_is_found(value):
    (finding,) = check_case(case_of(Layer(hiding(make_hidden_table(STRICT), value)), STRICT))
    assert finding.kind == "blind row"
    assert "row 0 may see nothing, but sees 5 of 6 tokens" in finding.evidence


def test_a_row_that_may_see_nothing_and_sees_nothing_is_checked():
    (checked,) = check_case(case_of(lambda q, k, v: attention(q, k, v, STRICT), STRICT))
    assert "may see nothing see nothing" in checked.what


def test_a_row_that_may_see_nothing_and_is_nan_is_found():
    table = torch.rand(5, 5) < 0.5
    table[2] = False
    case = case_of(lambda q, k, v: (q @ k.mT).masked_fill(~table, -torch.inf).softmax(-1) @ v, Given(table))
    (finding,) = check_case(case)
    assert "row 2 may see nothing, so its context should be 0" in finding.evidence


def test_its_own_token_that_a_residual_passes_on_is_no_finding():
    class Residual(Layer):
        def forward(self, x):
            return x + super().forward(x).nan_to_num()

    assert kinds(check_case(case_of(Residual(hiding(make_hidden_table(STRICT)), D_IN, D_IN), STRICT))) == []


def test_a_right_layer_has_none():
    assert kinds(check_case(case_of(Layer(hiding(later))))) == []
