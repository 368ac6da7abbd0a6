"""What is done to scores before their softmax is named, and told from what does nothing."""

import pytest
import torch

from examination.wrong_calls import D, Rotary
from regard import examine


class Changed(Rotary):
    """Scores by hand."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def attend(self, q, k, v):
        t = q.shape[2]
        scores = self.change(q @ k.mT / D**0.5).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v


CASES = [
    (torch.relu, "set to 0"),
    (lambda x: x.clamp(-0.3, 0.3), "clamped to -0.3"),
    (lambda x: x // 0.1, "rounded down"),
    (torch.square, "squared"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "does"), CASES)
def test_a_layer_that_changes_its_scores_is_named(change, does):
    torch.manual_seed(0)
    (finding, *_) = examine(Changed(change)).findings
    assert finding.kind == "wrong scores"
    assert does in finding.evidence
