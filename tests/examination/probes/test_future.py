"""A later token that is seen is found, with the query that sees it."""

import re

import pytest
import torch

from examination.subjects import D_IN, Layer, case_of, hiding, kinds, later
from regard import Causal, Everything, Padding, Prefix, Window, attention
from regard.examination.probes.future import check_case

AFTER = [
    lambda scores: scores.softmax(-1).tril(),  # the denominator sees all
    lambda scores: scores.tril().softmax(-1),  # the lectures' leak: 0 is a score like any other
    lambda scores: (scores * torch.ones_like(scores).tril()).softmax(-1),
    lambda scores: scores.masked_fill(later(*scores.shape[-2:]), 1e-9).softmax(-1),
    lambda scores: scores.masked_fill(later(*scores.shape[-2:]), -torch.inf).softmax(-2),
    lambda scores: scores.softmax(-1),
]


@pytest.mark.parametrize("weights", AFTER)
def test_a_future_leak_is_found_and_every_query_named(weights):
    (finding,) = check_case(case_of(Layer(weights)))
    assert finding.kind == "future leak"
    assert "every query sees every later token" in finding.evidence
    assert "-torch.inf" in finding.cure
    assert "If no mask is intended, pass expects=Everything()" in finding.cure


def test_the_evidence_names_the_first_query_that_leaks_and_a_token_after_it():
    hidden = later(6, 6)
    hidden[2, 5] = False
    (finding,) = check_case(case_of(Layer(hiding(lambda q, k: hidden)), sample=torch.randn(2, 6, D_IN)))
    assert 'changing token 5 "step" moves output 2 "starts" by' in finding.evidence
    assert "Everything()" not in finding.cure  # a query that sees one token too many has a mask
    assert float(re.search(r"by ([\d.e-]+)", finding.evidence)[1]) > 0.01


def test_a_mask_that_begins_one_too_late_is_reported():
    (finding,) = check_case(case_of(Layer(hiding(lambda q, k: later(q, k, 2)))))
    assert "one token too many" in finding.evidence
    assert "triu(diagonal=1)" in finding.cure


@pytest.mark.parametrize("weights", [hiding(later), hiding(later, -1e9), hiding(later, -1e4)])
def test_a_right_mask_has_no_finding_and_says_how_faint_a_leak_would_have_shown(weights):
    (checked,) = check_case(case_of(Layer(weights)))
    assert "1e-11" in checked.sensitivity


@pytest.mark.parametrize(
    ("found", "expects", "leaks"),
    [
        (Everything(), Everything(), []),
        (Everything(), Padding((3, 5)), []),
        (Window(1, 1), Window(1, 1), []),
        (Window(1, 2), Window(1, 1), []),  # the rule allows the future: it is a wrong mask
        (Causal() | Prefix(3), Causal() | Prefix(3), []),
        (Causal() | Prefix(4), Causal() | Prefix(3), ["future leak"]),
        (Causal(), Causal() & Padding((3, 5)), []),
        (Everything(), Causal() & Padding((3, 5)), ["future leak"]),
    ],
)
def test_only_what_the_expectation_hides_of_the_future_is_a_leak(found, expects, leaks):
    assert kinds(check_case(case_of(lambda q, k, v: attention(q, k, v, found), expects))) == leaks
