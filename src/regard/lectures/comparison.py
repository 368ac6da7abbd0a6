"""The claims of an example: its printed numbers and the computed ones."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from regard.lectures import printed_numbers
from regard.mechanism import Steps

Example = dict[str, Any]

INPUTS = {  # fields that are inputs, and so not compared
    "x": "the vectors of the words",
    "z": "the vector whose softmax is taken",
    "W_query": "a matrix of weights, given",
    "W_key": "a matrix of weights, given",
    "W_value": "a matrix of weights, given",
    "query_index": "which word asks",
    "seed": "where the random draw starts",
    "d_out": "the width asked for",
    "num_heads": "the number of heads asked for",
    "batch": "the number of copies of the input",
    "p": "the probability of dropout asked for",
    "tolerance": "how far a printed number may be off",
    "table.layers": "what a count of parameters is made from",
    "table.d_model": "what a count of parameters is made from",
}


class Verdict(StrEnum):
    """The result of a comparison; only DIFFERS is a failure."""

    AGREES = "agrees"
    WRONG = "agrees, but wrong"  # the numbers reproduce, but are not what the lectures call them
    MISPRINT = "misprint"  # known not to follow from the other printed numbers
    DIFFERS = "differs"


@dataclass(frozen=True, eq=False)
class FieldComparison:
    """A field of an example as printed and as computed."""

    field: str
    printed: Tensor
    computed: Tensor

    @property
    def difference(self) -> float:
        """The largest distance of two numbers; infinite if the shapes or the infinities differ, NaN if a number is NaN."""
        if self.printed.shape != self.computed.shape:
            return float("inf")
        printed, computed = self.printed.double(), self.computed.double()
        return float((printed - computed).abs().where(printed != computed, 0).max())  # -inf - -inf would be NaN


@dataclass(frozen=True, eq=False)
class Claim:
    """Some fields of an example that are judged together, and the verdict expected of them."""

    comparisons: list[FieldComparison]
    note: str = ""
    known: Verdict = Verdict.AGREES
    tolerance: float | None = None  # if it is not the example's


def compare_fields(example: Example, **computed: Tensor) -> list[FieldComparison]:
    """Pair the fields of an example with their computed values."""
    return [
        FieldComparison(field, printed_numbers.parse_tensor(example[field], torch.float64), value)
        for field, value in computed.items()
    ]


def compare_steps(example: Example, steps: Steps) -> list[FieldComparison]:
    """Compare the steps that an example prints under their own names."""
    return compare_fields(example, **{name: step for name, step in steps.items() if name in example})
