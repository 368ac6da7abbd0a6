"""What an example claims: numbers as they are printed beside the same numbers as they are computed."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from regard.lectures import figures
from regard.mechanism import Steps

Example = dict[str, Any]

INPUTS = {  # what is computed from, and so not compared
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
    """What came of a comparison; only DIFFERS is a failure."""

    AGREES = "agrees"
    WRONG = "agrees, but wrong"  # it reproduces, and what it reproduces is not what it says it is
    MISPRINT = "misprint"  # known not to follow from what is printed beside it
    DIFFERS = "differs"


@dataclass(frozen=True, eq=False)
class Comparison:
    """A field of an example as it is printed and as it is computed."""

    field: str
    printed: Tensor
    computed: Tensor

    @property
    def difference(self) -> float:
        """The largest distance of two numbers; infinite where the shapes or the infinities are others, NaN where one is NaN."""
        if self.printed.shape != self.computed.shape:
            return float("inf")
        printed, computed = self.printed.double(), self.computed.double()
        return float((printed - computed).abs().where(printed != computed, 0).max())  # -inf less -inf would be NaN


@dataclass(frozen=True, eq=False)
class Claim:
    """What an example says in one respect, and the verdict that is known to be due."""

    comparisons: list[Comparison]
    note: str = ""
    known: Verdict = Verdict.AGREES
    tolerance: float | None = None  # where it is not the example's


def compared(example: Example, **computed: Tensor) -> list[Comparison]:
    """The fields of an example beside what was computed for them."""
    return [Comparison(field, figures.tensor(example[field], torch.float64), value) for field, value in computed.items()]


def kept(example: Example, steps: Steps) -> list[Comparison]:
    """The steps that an example prints under their own names."""
    return compared(example, **{name: step for name, step in steps.items() if name in example})
