"""What an expectation asks of the inputs."""

import pytest
import torch

from regard import Causal, Documents, Everything, Given, Padding, Prefix, Window
from regard.examination import mask_requirements

TABLE = torch.rand(5, 7) < 0.5


@pytest.mark.parametrize("rule", [Window(left=7), Causal() & Window(left=7), Causal() | Prefix(7), ~Window(2, 7)])
def test_enough_tokens_are_tried_to_show_where_a_rule_turns(rule):
    (t,) = mask_requirements.choose_token_counts(rule)
    assert not torch.equal(Window(left=7).table(t, t), Window(left=8).table(t, t))


def test_a_rule_without_bounds_is_shown_by_the_usual_number():
    assert (
        mask_requirements.choose_token_counts(Causal())
        == mask_requirements.choose_token_counts(Everything())
        == [mask_requirements.USUAL]
    )


def test_the_first_length_that_is_tried_has_padding_in_every_sequence():
    assert mask_requirements.choose_token_counts(Padding((3, 5)))[0] > 5
    assert 5 in mask_requirements.choose_token_counts(Padding((3, 5)))


@pytest.mark.parametrize("rule", [Documents([0, 0, 1, 1, 1, 1, 1]), Given(TABLE), Causal() & Documents([[0] * 7, [1] * 7])])
def test_a_rule_of_one_batch_has_its_length(rule):
    assert rule.is_batch_specific
    assert mask_requirements.choose_token_counts(rule) == [7]


@pytest.mark.parametrize(
    ("rule", "batch"),
    [(Causal(), 2), (Padding((3, 5, 6)), 3), (Padding((3,)), 1), (Given(TABLE), 2), (Documents([[0], [1], [2]]), 3)],
)
def test_there_are_as_many_sequences_as_the_rule_tells_apart_and_two_where_it_allows(rule, batch):
    assert mask_requirements.choose_batch_size(rule) == batch


def test_padding_is_distinguished_from_the_rest():
    rule = Causal() & Padding((3, 5)) & Window(left=2)
    assert rule.padding == Padding((3, 5))
    assert rule.remove_padding() == Causal() & Window(left=2)
    assert (Padding((3, 5)) & Causal()).remove_padding() == Causal()
    assert Causal().padding is None
    assert Padding((3, 5)).remove_padding() is None


@pytest.mark.parametrize("offset", [0, 2])
def test_later_keys_and_the_own_one_are_distinguished_from_the_earlier(offset):
    q, k = 3, 5
    later, own = mask_requirements.make_later_table(q, k, offset), mask_requirements.make_own_table(q, k, offset)
    for i in range(q):
        assert later[i].tolist() == [j > i + offset for j in range(k)]
        assert own[i].tolist() == [j == i + offset for j in range(k)]


def test_of_many_queries_those_are_chosen_at_which_the_rule_turns():
    chosen = mask_requirements.choose_queries(200, Causal() & Window(left=127))
    assert {0, 126, 127, 128, 129, 199} <= set(chosen)
    assert len(chosen) < 20
    assert mask_requirements.choose_queries(11, Causal()) == list(range(11))
