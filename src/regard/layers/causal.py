"""Causal attention: a token sees itself and the tokens before it, with dropout of the weights; and two ways to mask."""

import torch
from torch import Tensor, nn

from regard.layers import checks
from regard.layers.one_head import context_of, steps_of
from regard.mechanism import Causal, Steps, softmax
from regard.mechanism.request import probability


class CausalAttention(nn.Module):
    """softmax(causal(q kᵀ / √d)) v, with dropout of the weights in training.

    Shapes: x (t, d_in) or (b, t, d_in), t at most context_length; the context (t, d_out) or (b, t, d_out).
    """

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__()
        checks.positive(d_in=d_in, d_out=d_out, context_length=context_length)
        self.d_in, self.context_length, qkv_bias = d_in, context_length, checks.has_bias(qkv_bias)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(probability(dropout))
        self.register_load_state_dict_pre_hook(checks.without_masks)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context of each token."""
        return context_of(*self.project(x), mask=Causal(), dropout=dropped(self.dropout))

    def steps(self, x: Tensor) -> Steps:
        """Compute every step of forward."""
        return steps_of(*self.project(x), mask=Causal(), dropout=dropped(self.dropout))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the queries, keys and values of each token."""
        checks.fits(x, self.d_in, self.context_length, like=self.W_query)
        return self.W_query(x), self.W_key(x), self.W_value(x)


def hidden_before_softmax(scores: Tensor) -> Tensor:
    """Compute the causal weights (..., t, t) in one step: softmax(scores, -inf above the diagonal)."""
    return softmax.stable(scores.masked_fill(~past(scores), -torch.inf))


def renormalised_after_softmax(scores: Tensor) -> Tensor:
    """Compute the causal weights (..., t, t) in three steps.

    The steps are softmax over all keys, zeros above the diagonal, and each row divided by its sum.
    """
    weights = softmax.stable(scores) * past(scores)
    return softmax.by_sum(weights)


def past(scores: Tensor) -> Tensor:
    """Return the causal table of scores (..., q, k)."""
    return Causal().table(*scores.shape[-2:]).to(scores.device)


def dropped(dropout: nn.Dropout) -> float:
    """Return the dropout probability in force: 0 outside training."""
    return dropout.p if dropout.training else 0.0
