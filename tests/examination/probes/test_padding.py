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


def test_padding_that_the_future_hides_from_real_queries_is_not_tested_on_them():
    assert kinds(run_probe(later(7, 7).expand(2, 7, 7), Causal() & Padding(LENGTHS))) == []


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


def test_padding_in_the_second_sequence_alone_is_found():
    hidden = ~REAL[:, None].repeat(1, 7, 1)
    hidden[1] = False
    (finding,) = run_probe(hidden)
    assert "sequence 1, which has length 5" in finding.evidence


def test_nothing_is_said_to_be_hidden_where_nothing_could_be_seen():
    layer = Layer(hiding(lambda q, k: ~REAL[:, None]))
    torch.nn.init.zeros_(layer.W_value.weight)
    assert list(check_case(case_of(layer, PADDING, SAMPLE))) == []


def test_nothing_is_said_where_no_padding_is_expected():
    assert run_probe(later(7, 7), Causal()) == []


def test_a_sample_without_padding_is_not_enough():
    (unknown,) = run_probe(torch.zeros(1, 7, 7, dtype=torch.bool), Padding((7, 7)))
    assert "sample with padding" in unknown.needs
