"""Weights that are a function of scores other than a softmax are named, and those of designs without a softmax are not."""

import pytest
import torch

from examination.wrong_calls import D, Rotary
from regard.examination import examine

T, WIDTH = 7, 5


def hide(weights):
    return weights.tril()


class WithoutSoftmax(Rotary):
    """Weights by hand, of scores beside rotary positions."""

    def __init__(self, make_weights):
        super().__init__()
        self.make_weights = make_weights

    def attend(self, q, k, v):
        return self.make_weights(q @ k.mT / D**0.5) @ v


MISTAKES = {"there is no softmax": hide, "a sigmoid of each score": lambda scores: hide(scores.sigmoid())}
RIGHT = {
    "sigmoid attention": lambda scores: hide((scores - 2).sigmoid()),
    "relu attention": lambda scores: hide(scores.relu() / scores.shape[-1]),
    "a kernel of scores": lambda scores: hide(1 + scores.square()) / hide(1 + scores.square()).sum(-1, keepdim=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("design", RIGHT)
def test_nothing_is_found_of_a_design_without_a_softmax(design):
    torch.manual_seed(0)
    assert not examine(WithoutSoftmax(RIGHT[design])).findings


def test_a_layer_that_refuses_other_values_is_examined_all_the_same():
    class Refusing(WithoutSoftmax):
        def attend(self, q, k, v):
            if bool((v[:, :, 0] == 0).all()):
                raise ValueError("values are zero")
            return super().attend(q, k, v)

    torch.manual_seed(0)
    report = examine(Refusing(MISTAKES["there is no softmax"]))
    assert "raises" not in [one.kind for one in report.findings]
    assert report.unknown
