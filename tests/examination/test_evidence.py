"""The sentences of evidence hold numbers that can be measured again."""

import torch

from examination.subjects import D_IN, Layer, case_of, hiding, later
from regard import Everything
from regard.examination import evidence


class Telling(Layer):
    """A layer that returns its weights beside its context."""

    def forward(self, x):
        scores = self.W_query(x) @ self.W_key(x).mT
        weights = self.weights(scores)
        return weights @ self.W_value(x), weights


def test_a_token_is_reported_with_its_word_where_there_are_six():
    assert evidence.format_token(case_of(Layer(hiding(later))), 3) == '3 "with"'
    assert evidence.format_token(case_of(Layer(hiding(later)), sample=torch.randn(2, 5, D_IN)), 3) == "3"


def test_a_token_that_is_not_seen_moves_nothing_and_one_that_is_moves_something():
    case = case_of(Layer(hiding(later)))
    assert evidence.measure_move(case, 2, 3) == 0
    assert evidence.measure_move(case, 3, 2) > 0.01
    assert evidence.measure_move(case, 3, 2, 0, 1) == 0


def test_a_weight_is_reported_where_weights_are_returned():
    case = case_of(Telling(lambda scores: scores.softmax(-1)), Everything())
    weight = case.run_subject(*case.make_usual_inputs(3)).weights[0, 1, 4]
    assert f"puts {weight:.2g} on token 4" in evidence.describe_dependency(case, 1, 4)
    assert "puts" not in evidence.describe_dependency(case_of(Layer(lambda scores: scores.softmax(-1)), Everything()), 1, 4)


def test_what_is_no_weight_is_not_reported_as_one():
    class States(Layer):
        def forward(self, x):
            return super().forward(x), x @ x.mT

    case = case_of(States(lambda scores: scores.softmax(-1)), Everything())
    assert "puts" not in evidence.describe_dependency(case, 1, 4)


def test_numbers_are_listed_as_one_says_them():
    said = [evidence.format_numbers(numbers) for numbers in ([3], [0, 3], [0, 3, 5], list(range(12)))]
    assert said == ["3", "0 and 3", "0, 3 and 5", "0, 1, 2 and 9 more"]
