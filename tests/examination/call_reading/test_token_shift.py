"""Queries, keys and values of other tokens are told from the numbers of their projections."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from examination.wrong_calls import D, Rotary
from regard import Causal, Everything, Window, examine
from regard.examination.call_reading.projection_source import ModuleOutput, find_source
from regard.examination.call_reading.token_shift import find_shift


@given(
    h=st.sampled_from([1, 2, 3]),
    t=st.sampled_from([5, 7]),
    n=st.sampled_from([-1, 0, 1]),
    rolls=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_shift_is_read_whatever_comes_in_at_the_end(h, t, n, rolls, seed):
    draw = torch.Generator().manual_seed(seed)
    y = torch.randn(2, t, h * D, generator=draw, dtype=torch.float64)
    outputs = [ModuleOutput("v_proj", y), ModuleOutput("other", torch.randn(2, t, h * D, generator=draw, dtype=torch.float64))]
    x = y.unflatten(-1, (h, D)).transpose(1, 2)
    x = x.roll(n, 2) if rolls or not n else F.pad(x, (0, 0, 1, 0))[:, :, :-1] if n == 1 else F.pad(x, (0, 0, 0, 1))[:, :, 1:]
    assert find_shift(x, find_source(x, outputs), outputs) == n


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


def test_tokens_that_move_together_are_not_shifted_against_each_other():
    class Turned(Rotary):
        def attend(self, *parts):
            return F.scaled_dot_product_attention(*(x.roll(1, 2) for x in parts)).roll(-1, 2)

    torch.manual_seed(2)
    assert not examine(Turned(), expects=Everything()).findings


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


def test_a_function_whose_values_stay_in_their_places_has_no_shift():
    assert examine(make_function(lambda v: v, True, True))
    linear = examine(lambda q, k, v: (F.elu(q) + 1) @ (F.elu(k) + 1).mT / q.shape[-1] @ v, expects=Everything())
    window = examine(make_function(lambda v: v, True, False), expects=Causal() & Window(1))
    assert "wrong positions" not in [one.kind for one in (*linear.findings, *window.findings)]
