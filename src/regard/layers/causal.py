"""Causal attention: a token sees itself and the tokens before it, with dropout of the weights; and two ways to mask."""

import torch
from torch import Tensor, nn

from regard.layers import checks
from regard.layers.simple import compute_head_context, compute_head_steps
from regard.mechanism import Causal, Steps, softmax
from regard.mechanism.request import check_probability


class CausalAttention(nn.Module):
    """softmax(causal(q kᵀ / √d)) v, with dropout of the weights in training.

    Shapes: x (t, d_in) or (b, t, d_in), t at most context_length; the context (t, d_out) or (b, t, d_out).
    """

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__()
        checks.check_sizes(d_in=d_in, d_out=d_out, context_length=context_length)
        self.d_in, self.context_length, qkv_bias = d_in, context_length, checks.check_bias_flag(qkv_bias)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(check_probability(dropout))
        self.register_load_state_dict_pre_hook(checks.drop_mask_buffer)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context of each token."""
        return compute_head_context(*self.project(x), mask=Causal(), dropout=get_active_dropout(self.dropout))

    def steps(self, x: Tensor) -> Steps:
        """Compute every step of forward."""
        return compute_head_steps(*self.project(x), mask=Causal(), dropout=get_active_dropout(self.dropout))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the queries, keys and values of each token."""
        checks.check_input(x, self.d_in, self.context_length, like=self.W_query)
        return self.W_query(x), self.W_key(x), self.W_value(x)


def mask_before_softmax(scores: Tensor) -> Tensor:
    """Compute the causal weights (..., t, t) in one step: softmax(scores, -inf above the diagonal)."""
    return softmax.stable(scores.masked_fill(~make_causal_table(scores), -torch.inf))


def renormalize_after_softmax(scores: Tensor) -> Tensor:
    """Compute the causal weights (..., t, t) in three steps.

    The steps are softmax over all keys, zeros above the diagonal, and each row divided by its sum.
    """
    weights = softmax.stable(scores) * make_causal_table(scores)
    return softmax.by_sum(weights)


def make_causal_table(scores: Tensor) -> Tensor:
    """Return the causal table of scores (..., q, k)."""
    return Causal().table(*scores.shape[-2:]).to(scores.device)


def get_active_dropout(dropout: nn.Dropout) -> float:
    """Return the dropout probability in force: 0 outside training."""
    return dropout.p if dropout.training else 0.0
