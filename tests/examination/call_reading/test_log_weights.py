"""Logarithms of weights that are multiplied by values are named, and told from logarithms that become weights again."""

import pytest
import torch

from examination.wrong_calls import D, Rotary
from regard.examination import examine

HIDDEN = -1e9


class ByHand(Rotary):
    """Scores by hand, hidden by a large number, beside rotary positions or without positions."""

    def __init__(self, make_weights, has_positions):
        super().__init__()
        self.make_weights, self.has_positions = make_weights, has_positions

    def place(self, q, k):
        return super().place(q, k) if self.has_positions else (q, k)

    def attend(self, q, k, v):
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return self.make_weights((q @ k.mT / D**0.5).masked_fill(hidden, HIDDEN), hidden) @ v


WEIGHTS = {
    "exponentials of it": lambda scores, hidden: scores.log_softmax(-1).exp(),
    "a softmax of it": lambda scores, hidden: scores.log_softmax(-1).softmax(-1),
    "beside it": lambda scores, hidden: scores.softmax(-1) + 0 * scores.log_softmax(-1).sum(),
}


@pytest.mark.parametrize("way", WEIGHTS)
def test_a_log_softmax_that_becomes_weights_is_right(way):
    torch.manual_seed(0)
    assert not examine(ByHand(WEIGHTS[way], has_positions=True)).findings
