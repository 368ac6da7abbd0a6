"""Logarithms of weights that are multiplied by values are named, and told from logarithms that become weights again."""

import pytest
import torch
import torch.nn.functional as F

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


LOGARITHMS = {
    "as it is": lambda scores, hidden: F.log_softmax(scores, -1),
    "NaN": lambda scores, hidden: scores.masked_fill(hidden, -torch.inf).log_softmax(-1).nan_to_num(neginf=0.0),
    "masked after it": lambda scores, hidden: torch.log_softmax(scores, -1).masked_fill(hidden, 0.0),
}
WEIGHTS = {
    "exponentials of it": lambda scores, hidden: scores.log_softmax(-1).exp(),
    "a softmax of it": lambda scores, hidden: scores.log_softmax(-1).softmax(-1),
    "beside it": lambda scores, hidden: scores.softmax(-1) + 0 * scores.log_softmax(-1).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("has_positions", [True, False])
@pytest.mark.parametrize("way", LOGARITHMS)
def test_log_softmax_in_place_of_softmax_is_named_first(way, has_positions):
    torch.manual_seed(0)
    (finding, *_) = examine(ByHand(LOGARITHMS[way], has_positions)).findings
    assert finding.kind == "not normalised"
    assert "log_softmax is used instead of softmax" in finding.evidence
    assert "torch.softmax(scores, dim=-1)" in finding.cure


@pytest.mark.parametrize("way", WEIGHTS)
def test_a_log_softmax_that_becomes_weights_is_right(way):
    torch.manual_seed(0)
    assert not examine(ByHand(WEIGHTS[way], has_positions=True)).findings
