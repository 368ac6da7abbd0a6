"""The softmax in four forms on the same vectors: their results, and where each fails."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from regard.lectures.example_steps import Example, ExampleStep, StepTable
from regard.lectures.printed_numbers import name_lectures
from regard.mechanism import softmax

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "by_sum": softmax.by_sum,
    "naive": softmax.naive,
    "stable": softmax.stable,
    "blockwise": functools.partial(softmax.blockwise, block=2),
}
VECTORS = {  # scores, and a sentence about the results
    "moderate scores": (
        (2.0, 1.0, 0.1),
        "The last three agree; by_sum divides without exponentials, so it is another function.",
    ),
    "a negative sum": (
        (1.0, -2.0, 0.5),
        "by_sum breaks: the sum is -0.5, so its 'weights' change sign and are not probabilities.",
    ),
    "scores near 1000": (
        (1000.0, 999.0, 998.0),
        "naive breaks: e^1000 is more than float32 holds, and inf / inf is NaN; stable subtracts the greatest score first.",
    ),
    "scores near -1000": (
        (-1000.0, -999.0, -998.0),
        "naive breaks again: each exponential is 0, and 0 / 0 is NaN; by_sum gives the least score the most.",
    ),
    "scores far apart": (
        (0.0, -1000.0, -2000.0),
        "Even stable rounds e^-1000 to 0: right as a weight, but its logarithm is -inf, not -1000; by_sum is upside down.",
    ),
}


def build_softmax_example() -> Example:
    """Softmax in four forms (by_sum, naive, stable, blockwise) on the same vectors, with those that break three of them."""
    steps = (show_softmax_forms(name, torch.tensor(scores), sentence) for name, (scores, sentence) in VECTORS.items())
    return Example(
        name="softmax",
        title="Scores to weights in four forms",
        source=name_lectures("softmax-211"),
        before=tuple(steps),
        notes=(
            "by_sum: s / Σ s. naive: e^s / Σ e^s. stable: e^(s - max s) / Σ e^(s - max s). blockwise: stable, its maximum and "
            "sum gathered in one pass, here over blocks of 2.",
        ),
        leads_to="scale",
    )


def show_softmax_forms(name: str, scores: Tensor, sentence: str) -> ExampleStep:
    """Show the weights of one vector of scores by each form, and their sum."""
    weights = torch.stack([form(scores) for form in FORMS.values()])
    values = torch.cat((weights, weights.sum(-1, keepdim=True)), -1)
    columns = (*(f"{score:g}" for score in scores.tolist()), "sum")
    return ExampleStep(name, f"softmax of ({', '.join(columns[:-1])})", sentence, (StepTable(values, tuple(FORMS), columns),))
