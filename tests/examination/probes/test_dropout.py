"""What is drawn in evaluation is found, and dropout whose mean is not what evaluation gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examination import wrong_training as wrong
from examination.subjects import D_OUT, Layer, case_of, hiding, kinds, later
from regard.examination.probes.dropout import check_case

P = 0.3
weigh = hiding(later)


class Dropped(Layer):
    """Dropout of the weights, the input or the output, as nn.Dropout does it."""

    def __init__(self, where, p=P):
        super().__init__(weigh)
        self.where, self.dropout = where, nn.Dropout(p)

    def forward(self, x):
        x = self.dropout(x) if self.where == "input" else x
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        weights = weigh(q @ k.mT / D_OUT**0.5)
        y = (self.dropout(weights) if self.where == "weights" else weights) @ v
        return self.dropout(y) if self.where == "output" else y


class Kept(Dropped):
    """Zeros of which nothing makes up."""

    def forward(self, x):
        y = super().forward(x)
        return y * (1 - P) if self.training else y


class HiddenScoresDropped(Layer):
    """Dropout of scores that are -inf where they are hidden, and of the weights too."""

    def __init__(self, p_of_weights):
        super().__init__(weigh)
        self.p_of_weights = p_of_weights

    def forward(self, x):
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        scores = (q @ k.mT / D_OUT**0.5).masked_fill(later(x.shape[1], x.shape[1]), -torch.inf)
        weights = F.dropout(scores, P, self.training).softmax(-1)
        return F.dropout(weights, self.p_of_weights, self.training) @ v


def findings(layer, **told):
    return [
        one
        for one in check_case(case_of(layer.eval() if isinstance(layer, nn.Module) else layer, **told))
        if hasattr(one, "kind")
    ]


@pytest.mark.parametrize("p_of_weights", [0.0, P])
def test_dropped_scores_of_minus_infinity_are_found_by_the_nan_that_they_are_in_training(p_of_weights):
    (finding,) = findings(HiddenScoresDropped(p_of_weights))
    assert finding.kind == "dropout not rescaled"
    assert "is NaN, and in evaluation it is finite" in finding.evidence


@pytest.mark.parametrize("drop", [nn.Dropout(P), torch.nn.functional.dropout, lambda x, p, on: torch.dropout(x, p, on)])
def test_dropped_scores_are_found_whichever_function_drops_them(drop):
    class Scores(Layer):
        def __init__(self):
            super().__init__(weigh)
            self.drop = drop

        def forward(self, x):
            scores = (self.W_query(x) @ self.W_key(x).mT).masked_fill(later(x.shape[1], x.shape[1]), -torch.inf)
            dropped = self.drop(scores) if isinstance(self.drop, nn.Module) else self.drop(scores, P, self.training)
            return dropped.softmax(-1) @ self.W_value(x)

    (finding,) = findings(Scores())
    assert "is NaN" in finding.evidence


class Divided(Layer):
    """A division of zero by zero in training, without dropout."""

    def forward(self, x):
        y = super().forward(x)
        return y * (y - y).detach() / (y - y).abs().mean() if self.training else y


class Infinite(Layer):
    """An output that overflows in training."""

    def forward(self, x):
        return super().forward(x) / (0.0 if self.training else 1.0)


class NeverKept(Dropped):
    """Stochastic depth that keeps nothing, and divides by its share."""

    def forward(self, x):
        y = super().forward(x)
        return y * torch.bernoulli(torch.zeros(len(x), 1, 1)) / 0.0 if self.training else y


class Renormalized(Layer):
    """Dropped weights that are divided by their sum, which is zero where all were dropped."""

    def forward(self, x):
        weights = F.dropout(weigh(self.W_query(x) @ self.W_key(x).mT), 0.9, self.training)
        return weights / weights.sum(-1, keepdim=True) @ self.W_value(x)


@pytest.mark.parametrize("layer", [Divided(weigh), Infinite(weigh), NeverKept("weights"), Renormalized(weigh)])
def test_other_numbers_that_are_not_finite_in_training_are_not_taken_for_dropped_scores(layer):
    assert not any("is NaN" in one.evidence or "is inf" in one.evidence for one in findings(layer))


@pytest.mark.parametrize("layer", [wrong.DropsAlways(), wrong.KernelDropsAlways()])
def test_what_is_drawn_in_evaluation_is_found(layer):
    (finding,) = findings(layer)
    assert finding.kind == "dropout in evaluation"
    assert "in evaluation mode" in finding.evidence


@pytest.mark.parametrize("where", ["weights", "input", "output"])
def test_dropout_that_is_rescaled_is_no_finding_wherever_it_stands(where):
    said = list(check_case(case_of(Dropped(where).eval())))
    assert kinds(said) == []
    assert any("mean" in one.what for one in said)


@pytest.mark.parametrize("where", ["weights", "input", "output"])
def test_zeros_that_nothing_makes_up_for_are_found(where):
    (finding,) = findings(Kept(where))
    assert finding.kind == "dropout not rescaled"
    assert "0.7 times" in finding.evidence or "0.69" in finding.evidence or "0.70" in finding.evidence


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_every_probability_is_near_enough_to_its_mean(p):
    assert findings(Dropped("weights", p)) == []


def test_dropout_of_scores_is_distinguished():
    torch.manual_seed(0)
    (finding,) = findings(wrong.ScoresDropped())
    assert finding.kind == "dropout not rescaled"
    assert "scores are dropped" in finding.evidence


def test_the_module_stays_in_evaluation():
    layer = Dropped("weights").eval()
    list(check_case(case_of(layer)))
    assert not layer.training
    assert not layer.dropout.training
