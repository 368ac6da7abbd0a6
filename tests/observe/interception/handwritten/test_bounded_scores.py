"""Bounds that no score reaches, and the largest score of a row, bounded or not, leave a softmax and its formula as they are."""

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, H, D = 2, 7, 10, 2, 5
HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """Causal attention whose weights `weigh` makes of its scores."""

    def __init__(self, weigh) -> None:
        super().__init__()
        self.qkv, self.weigh = nn.Linear(C, 3 * C), weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        weights = self.weigh(q @ k.mT * D**-0.5)
        self.weights = weights.detach()
        return (weights @ v).transpose(1, 2).flatten(2)


def hide(scores: Tensor) -> Tensor:
    return scores.masked_fill(HIDDEN, -torch.inf)


def divide(scores: Tensor, most: Tensor, extra: bool) -> Tensor:
    e = (scores - most).exp()
    return e / (e.sum(-1, keepdim=True) + (-most).exp() * extra) if extra else e / e.sum(-1, keepdim=True)


RIGHT = {
    "clamped": lambda s: hide(s.clamp(-50, 50)).softmax(-1),
    "clamped from above": lambda s: hide(s.clamp_max(50)).softmax(-1),
    "clipped after the mask": lambda s: hide(s).clip(max=50).softmax(-1),
    "less the largest, 0 at least": lambda s: divide(hide(s), hide(s).amax(-1, keepdim=True).clamp(min=0), False),
    "softmax1": lambda s: divide(hide(s), hide(s).amax(-1, keepdim=True), True),
    "softmax1, less the largest, 0 at least": lambda s: divide(hide(s), hide(s).amax(-1, keepdim=True).clamp_min(0), True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_formula_of_bounded_scores_is_read(name):
    model = nn.Sequential(Attention(RIGHT[name]))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert not recording.notes
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("bound", [0.1, 0.3])
def test_bounds_that_scores_reach_leave_the_weights_as_they_are(bound):
    model = nn.Sequential(Attention(lambda s: hide(s.clamp(-bound, bound)).softmax(-1)))
    recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, T, C)))
    assert recording.notes
    torch.testing.assert_close(recording.map(0).dense(), model[0].weights, rtol=0, atol=EQUAL)
