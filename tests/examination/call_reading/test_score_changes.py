"""What is done to scores before their softmax is named, and told from what does nothing."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from examination.wrong_calls import D, Rotary
from regard import examine
from regard.examination.call_reading.score_changes import explain_scores

CHANGES = {
    "negative scores are set to 0": torch.relu,
    "negative scores are multiplied by 0.2": lambda x: F.leaky_relu(x, 0.2),
    "absolute values": torch.abs,
    "clamped to -0.5 from below and 0.7 from above": lambda x: x.clamp(-0.5, 0.7),
    "clamped to 0.7 from above": lambda x: x.clamp(max=0.7),
    "rounded down to whole numbers": torch.floor,
    "squared": torch.square,
}


@given(change=st.sampled_from(list(CHANGES)), factor=st.floats(0.1, 3), hides=st.booleans(), seed=st.integers(0, 99))
def test_a_change_of_each_score_is_read_with_its_bounds(change, factor, hides, seed):
    draw = torch.Generator().manual_seed(seed)
    products = torch.randn(2, 3, 11, 11, generator=draw, dtype=torch.float64) / factor
    hidden = torch.ones(11, 11, dtype=torch.bool).triu(1) if hides else torch.zeros(11, 11, dtype=torch.bool)
    given = CHANGES[change](factor * products).masked_fill(hidden, -torch.inf)
    found = explain_scores(given, [products])
    assert found is not None
    assert change in found.does
    for same in (factor * products, (factor * products).clamp(-9, 9), (factor * products) + 0.3):
        assert explain_scores(same.masked_fill(hidden, -torch.inf), [products]) is None


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


@pytest.mark.parametrize(("change", "does"), CASES)
def test_a_layer_that_changes_its_scores_is_named(change, does):
    torch.manual_seed(0)
    (finding, *_) = examine(Changed(change)).findings
    assert finding.kind == "wrong scores"
    assert does in finding.evidence
