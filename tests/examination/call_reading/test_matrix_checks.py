"""Weights that are transposed beside rotary positions are told from a softmax over the queries."""

import pytest
import torch

from examination.wrong_calls import D, Rotary
from regard import Everything
from regard.examination import examine


class ByHand(Rotary):
    """Weights that `change` changes after, or makes of, scores by hand."""

    def __init__(self, change, is_causal):
        super().__init__()
        self.change, self.is_causal = change, is_causal

    def attend(self, q, k, v):
        scores = q @ k.mT / D**0.5
        if self.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        return self.change(scores) @ v


def transpose(scores):
    return scores.softmax(-1).mT


def normalize_queries(scores):
    return scores.softmax(-2)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("change", "kind", "does"),
    [(transpose, "wrong roles", "the weights are transposed"), (normalize_queries, "wrong axis", "runs over the queries")],
)
def test_transposed_weights_and_a_softmax_over_queries_are_named(change, kind, does, is_causal):
    torch.manual_seed(0)
    layer = ByHand(change, is_causal)
    (finding, *_) = examine(layer, **({} if is_causal else {"expects": Everything()})).findings
    assert finding.kind == kind
    assert does in finding.evidence
