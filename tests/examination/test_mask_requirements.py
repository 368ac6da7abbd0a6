"""What an expectation asks of the inputs."""

import pytest
import torch

from regard import Causal, Documents, Given, Padding, Prefix, Window
from regard.examination import mask_requirements

TABLE = torch.rand(5, 7) < 0.5


@pytest.mark.parametrize("rule", [Window(left=7), Causal() & Window(left=7), Causal() | Prefix(7), ~Window(2, 7)])
def test_enough_tokens_are_tried_to_show_where_a_rule_turns(rule):
    (t,) = mask_requirements.choose_token_counts(rule)
    assert not torch.equal(Window(left=7).table(t, t), Window(left=8).table(t, t))


@pytest.mark.parametrize(
    ("rule", "batch"),
    [(Causal(), 2), (Padding((3, 5, 6)), 3), (Padding((3,)), 1), (Given(TABLE), 2), (Documents([[0], [1], [2]]), 3)],
)
def test_there_are_as_many_sequences_as_the_rule_tells_apart_and_two_where_it_allows(rule, batch):
    assert mask_requirements.choose_batch_size(rule) == batch
