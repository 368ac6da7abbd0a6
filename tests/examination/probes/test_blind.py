"""Rows that are not finite, and rows that see though they may not, are found."""

import pytest
import torch

from examination.subjects import D_IN, Layer, case_of, hiding, kinds, later, make_hidden_table
from regard import Causal, Padding, Window, attention
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


@pytest.mark.parametrize("value", [-1e9, torch.finfo(torch.float32).min])
def test_a_row_that_may_see_nothing_and_sees_all_is_found(value):
    (finding,) = check_case(case_of(Layer(hiding(make_hidden_table(STRICT), value)), STRICT))
    assert finding.kind == "blind row"
    assert "row 0 may see nothing, but sees 5 of 6 tokens" in finding.evidence


def test_a_row_that_may_see_nothing_and_sees_nothing_is_checked():
    (checked,) = check_case(case_of(lambda q, k, v: attention(q, k, v, STRICT), STRICT))
    assert "may see nothing see nothing" in checked.what


def test_a_right_layer_has_none():
    assert kinds(check_case(case_of(Layer(hiding(later))))) == []
