"""A factor on values or contexts is read: one of the scale of the scores is a mistake, another may be meant."""

import pytest
import torch

from examination.whole_models import Blocks
from examination.wrong_calls import C, D, Rotary
from examination.wrong_sources import Written
from regard import examine


class Factors(Written):
    """Attention by hand whose values and contexts are multiplied by a factor each."""

    def __init__(self, values=1.0, context=1.0):
        super().__init__()
        self.values, self.context = values, context

    def place(self, q, k):
        return q, k

    def attend(self, q, k, v):
        return super().attend(q, k, v * self.values) * self.context


class FactorsBesideRotary(Rotary):
    """The same of a kernel with rotary positions."""

    def __init__(self, values=1.0, context=1.0):
        super().__init__()
        self.values, self.context = values, context

    def attend(self, q, k, v):
        return super().attend(q, k, v * self.values) * self.context


def examine_factors(make, values, context, in_model=False):
    torch.manual_seed(0)
    return examine(Blocks(lambda: make(values, context)) if in_model else make(values, context))


NAMED = [
    (D**0.5, 1, "values are multiplied by 2.449, √6, where 6 is the width of a head"),
    (D**-0.5, 1, "values are multiplied by 0.4082, 1 / √6, where 6 is the width of a head"),
    (C**-0.5, 1, "values are multiplied by 0.2041, 1 / √24, where 24 is the width of all heads"),
    (1, D**0.5, "the context is multiplied by 2.449, √6, where 6 is the width of a head"),
    (D**-0.25, D**-0.25, "values and their context are multiplied by 0.4082, 1 / √6, where 6 is the width of a head"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "values", "context", "evidence", "in_model"),
    [
        *((Factors, *one, False) for one in NAMED),
        (FactorsBesideRotary, *NAMED[0], False),
        (Factors, *NAMED[0], True),
        (FactorsBesideRotary, *NAMED[3], True),
    ],
)
def test_a_factor_of_the_scale_of_scores_is_named(make, values, context, evidence, in_model):
    report = examine_factors(make, values, context, in_model)
    assert [one.kind for one in report.findings] == ["wrong scale"]
    assert report.findings[0].evidence == f"in {'blocks.0.attention' if in_model else 'the layer'} {evidence}"


@pytest.mark.parametrize(("values", "context", "in_model"), [(1, 1, True), (4, 0.25, False), (D**0.5, D**-0.5, False)])
def test_no_factor_is_no_finding(values, context, in_model):
    report = examine_factors(FactorsBesideRotary, values, context, in_model)
    assert report
    assert not [one for one in report.unknown if "multiplied" in one.what]


def test_a_context_that_is_divided_by_the_number_of_tokens_is_named():
    class Mean(Written):
        def attend(self, q, k, v):
            return super().attend(q, k, v) / q.shape[2]

    torch.manual_seed(0)
    sample = torch.randn(2, 7, C)
    (finding, *_) = examine(Mean(), sample=sample).findings
    assert finding.evidence == "in the layer the context is multiplied by 0.1429, 1 / 7, where 7 is the number of tokens"


@pytest.mark.parametrize("in_model", [False, True])
def test_contexts_that_are_divided_by_the_number_of_keys_are_named(in_model):
    class Divided(Rotary):
        def attend(self, q, k, v):
            return super().attend(q, k, v) / torch.arange(1, q.shape[2] + 1)[:, None]

    torch.manual_seed(0)
    (finding, *_) = examine(Blocks(Divided) if in_model else Divided()).findings
    assert finding.kind == "not normalised"
    assert finding.evidence.endswith("each context is divided by the number of keys that its query sees")
