"""A key that is padding and seen is found."""

import pytest
import torch

from examination.subjects import D_IN, Layer, case_of, hiding, kinds, later
from regard import Causal, Padding
from regard.examination.probes.padding import check_case

LENGTHS = (3, 5)
REAL = torch.arange(7) < torch.tensor(LENGTHS).unsqueeze(-1)  # (b, k)
PADDING = Padding(LENGTHS)
SAMPLE = torch.randn(2, 7, D_IN)


def run_probe(hidden, expects=PADDING, value=-torch.inf, sample=SAMPLE):
    return list(check_case(case_of(Layer(hiding(lambda q, k: hidden, value)), expects, sample)))


def test_padding_that_is_hidden_is_no_finding():
    assert kinds(run_probe(~REAL[:, None])) == []
    assert kinds(run_probe(~REAL[:, None] | later(7, 7), Causal() & Padding(LENGTHS))) == []


def test_padding_that_is_seen_is_a_finding_with_its_sequence():
    (finding,) = run_probe(torch.zeros(2, 7, 7, dtype=torch.bool))
    assert finding.kind == "padding leak"
    assert "sequence 0, which has length 3, is padding" in finding.evidence


@pytest.mark.parametrize("value", [-torch.inf, -1e9])
def test_the_padding_of_the_wrong_side_is_reported(value):
    (finding,) = run_probe(~REAL.flip(-1)[:, None], value=value)
    assert finding.kind == "padding leak"
    assert "its real tokens" in finding.evidence
    assert "hidden instead" in finding.evidence
    assert "wrong side" in finding.cure


def test_padded_queries_that_are_hidden_in_the_place_of_padded_keys_leak():
    (finding,) = run_probe(~REAL[:, :, None].expand(2, 7, 7))
    assert finding.kind == "padding leak"
