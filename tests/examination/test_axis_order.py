"""What is right in another layout is not called wrong: it is asked which one is meant."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import Everything


def tokens_second(q, k, v):
    """q, k and v (b, t, h, d)."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def third_axis(q, k, v):
    """q, k and v (b, t, d)."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(2) @ v


@pytest.mark.slow
def test_a_function_with_heads_second_to_last_gets_the_argument_that_says_so():
    with pytest.raises(regard.ConfigError, match=r"correct on tensors \(b, t, h, d\).*lambda q, k, v: tokens_second"):
        regard.examine(tokens_second)


@pytest.mark.slow
def test_what_is_right_with_three_axes_is_reported_as_such_beside_what_is_wrong_with_four():
    finding = regard.examine(third_axis).findings[0]
    assert finding.kind == "wrong axis"
    assert "If they are intended: examine(third_axis, sample=(q, k, v))" in finding.cure


@pytest.mark.slow
def test_a_sample_says_how_many_axes_are_meant():
    assert regard.examine(third_axis, sample=tuple(torch.randn(3, 2, 6, 8)))
    assert regard.examine(third_axis, sample=tuple(torch.randn(3, 2, 3, 6, 8))).findings[0].kind == "wrong axis"


class TokensFirst(nn.Module):
    """x (t, b, c)."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.slow
def test_a_module_whose_tokens_come_first_gets_the_argument_that_says_so():
    finding = regard.examine(TokensFirst(), expects=Everything()).findings[0]
    assert finding.kind == "batch leak"
    assert "If it is intended to take (t, b, c)" in finding.cure
