"""A mask that is turned round, one off, or leaves itself out is found and named."""

import pytest
import torch
from torch import nn

from examination.subjects import Layer, Residual, case_of, hiding, kinds, later, make_hidden_table
from regard import Causal, Documents, Everything, Given, Padding, Prefix, Window, attention
from regard.examination.probes.pattern import check_case

C = Causal()


def run_probe(found, expects, sample=None):
    return list(check_case(case_of(lambda q, k, v: attention(q, k, v, found), expects, sample)))


@pytest.mark.parametrize("hidden", [lambda q, k: ~later(q, k), lambda q, k: later(q, k).mT, lambda q, k: ~later(q, k, 0)])
@pytest.mark.parametrize("value", [-torch.inf, -1e9])
def test_a_mask_that_is_turned_round_is_found(hidden, value):
    found = [one for one in check_case(case_of(Layer(hiding(hidden, value)))) if hasattr(one, "kind")]
    assert [one.kind for one in found] == ["inverted mask"]
    assert "the mask is inverted" in found[0].evidence


@pytest.mark.parametrize(
    ("found", "expects", "named"),
    [
        (C & Window(left=4), C & Window(left=3), "Window(left=4"),
        (C & Window(left=2), C & Window(left=3), "Window(left=2"),
        (C, C & Window(left=3), "The measured mask is Causal(), not "),
        (C & Window(left=20), C & Window(left=19), "Window(left=20"),
        (C & Window(left=128), C & Window(left=129), "Window(left=128"),
        (C, Everything(), "The measured mask is Causal(), not "),
        (C, C & Documents([0, 0, 1, 1, 1]), "The measured mask is Causal(), not "),
        (C | Prefix(2), C | Prefix(3), ""),
        (Window(0, 0), C, "no output depends on any token but its own, but Causal() allows 15 pairs of different tokens"),
    ],
    ids=str,
)
def test_a_wrong_bound_is_found_and_what_is_seen_named(found, expects, named):
    (finding,) = run_probe(found, expects)
    assert finding.kind == "wrong mask"
    assert named in finding.evidence


@pytest.mark.parametrize(
    "rule", [Everything(), C, C & Window(left=3), Window(2, 1), C | Prefix(3), Padding((3, 5)), C & ~Window(0, 0)], ids=str
)
def test_a_right_rule_is_checked(rule):
    (checked,) = run_probe(rule, rule)
    assert str(rule) in checked.what


@pytest.mark.parametrize("value", [-torch.inf, -1e9])
def test_a_query_that_does_not_see_itself_is_reported(value):
    (finding,) = check_case(case_of(Layer(hiding(lambda q, k: later(q, k, 0), value))))
    assert finding.kind == "wrong mask"
    assert "does not see its own token" in finding.evidence
    assert "triu(diagonal=1)" in finding.cure


@pytest.mark.parametrize("diagonal", [0, 1])
def test_beside_a_residual_it_is_said_that_nobody_can_tell(diagonal):
    layer = Residual(lambda scores: hiding(lambda q, k: later(q, k, diagonal), -1e9)(scores))
    found = list(check_case(case_of(layer)))
    assert kinds(found) == []
    assert "its own token" in found[-1].what


def test_a_row_that_sees_nothing_though_it_may_is_found():
    def zero_blind_rows(scores):
        return scores.masked_fill(later(*scores.shape[-2:], 0), -torch.inf).softmax(-1).nan_to_num()

    (finding,) = check_case(case_of(lambda q, k, v: zero_blind_rows(q @ k.mT) @ v))
    assert "query 0 does not see its own token" in finding.evidence


def test_a_layer_that_gives_the_same_whatever_comes_shows_nothing():
    layer = Layer(hiding(later))
    nn.init.zeros_(layer.W_value.weight)
    (unknown,) = check_case(case_of(layer))
    assert "no output depends on any token" in unknown.what


def test_a_window_with_queries_and_keys_exchanged_is_found():
    rule = Window(2, 0)
    found = check_case(case_of(Layer(hiding(lambda q, k: ~rule.table(q, k).mT)), rule))
    assert "inverted mask" in kinds(found)


def test_a_query_that_may_not_see_its_own_token_is_found_only_where_it_does():
    table = torch.ones(6, 6, dtype=torch.bool).tril()
    table[3, 3] = False
    for rule, row in ((Given(table), '3 "with"'), (C & ~Window(0, 0) | Prefix(1), '1 "journey"')):
        assert kinds(check_case(case_of(Layer(hiding(make_hidden_table(rule))), rule))) == []
        (finding,) = check_case(case_of(Layer(hiding(later)), rule))
        assert finding.kind == "wrong mask"
        assert f"changing token {row} moves output {row} by" in finding.evidence


def test_a_layer_follows_its_rule():
    for rule in (C, Window(1, 1), C & Window(left=2)):
        assert kinds(check_case(case_of(Layer(hiding(make_hidden_table(rule))), rule))) == []
