"""Queries, keys and values of other tokens are told from the numbers of their projections."""

import pytest
import torch
import torch.nn.functional as F

from examination.wrong_calls import Rotary
from regard import Causal, Everything, examine


@pytest.mark.slow
@pytest.mark.parametrize("who", range(3))
@pytest.mark.parametrize("n", [-1, 1])
def test_who_is_shifted_is_named(who, n):
    class Shifted(Rotary):
        def attend(self, *parts):
            return F.scaled_dot_product_attention(*(x.roll(n, 2) if i == who else x for i, x in enumerate(parts)))

    torch.manual_seed(2)
    (finding, *_) = examine(Shifted(), expects=Everything()).findings
    here, there = (1, 0) if n == 1 else (0, 1)
    assert finding.kind == "wrong positions"
    assert finding.evidence.startswith(f"in the layer {('queries', 'keys', 'values')[who]} are shifted by a token")
    assert finding.evidence.endswith(f"in the place of token {here} is that of token {there}")


def shift_values(v, n, rolls):
    return v.roll(n, -2) if rolls else F.pad(v, (0, 0, 1, 0))[..., :-1, :] if n == 1 else F.pad(v, (0, 0, 0, 1))[..., 1:, :]


def make_function(change, is_causal, by_hand):
    """A function (q, k, v) -> context whose values are changed."""

    def attend(q, k, v):
        if not by_hand:
            return F.scaled_dot_product_attention(q, k, change(v), is_causal=is_causal)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & torch.tensor(is_causal)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ change(v)

    return attend


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("n", "rolls"), [(1, True), (-1, True), (1, False)])
def test_values_that_a_function_shifts_are_named_first(n, rolls, is_causal, by_hand):
    function = make_function(lambda v: shift_values(v, n, rolls), is_causal, by_hand)
    (finding, *_) = examine(function, expects=Causal() if is_causal else Everything()).findings
    here, there = (1, 0) if n == 1 else (0, 1)
    assert finding.kind == "wrong positions"
    assert "in the function values are shifted by a token" in finding.evidence
    assert finding.evidence.endswith(f"in the place of token {here} is that of token {there}")
