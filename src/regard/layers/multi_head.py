"""Causal attention with many heads: stacked modules, or one module that splits its projections; each converts to the other."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.layers import checks
from regard.layers.causal import CausalAttention, get_active_dropout
from regard.layers.self_attention import copy_rows, make_uninitialized
from regard.matmul import Linear
from regard.mechanism import EVERYTHING, Causal, Mask, Steps, attend, attention, heads
from regard.mechanism.arguments import check_instance
from regard.mechanism.mask_algebra import Offset
from regard.mechanism.request import check_probability

CacheUpdate = Callable[
    [Tensor, Tensor], tuple[Tensor, Tensor, Offset]
]  # from new keys and values to all of them, and the offset
PROJECTIONS = ("W_query", "W_key", "W_value")
MOST_HEADS = 2**16  # of StackedHeads


class StackedHeads(nn.Module):
    """Causal attention several times, with the contexts concatenated; d_out is the width of each head.

    Shapes: x (t, d_in) or (b, t, d_in); the context (..., t, num_heads d_out).
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        checks.check_sizes(num_heads=num_heads)
        if num_heads > MOST_HEADS:
            raise ConfigError(f"num_heads must be at most {MOST_HEADS:,}, because each head is a module; got {num_heads:,}.")
        self.heads = nn.ModuleList(CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads))

    def __iter__(self) -> Iterator[CausalAttention]:
        """Iterate over the heads in order."""
        return (cast(CausalAttention, head) for head in self.heads)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the contexts of all heads, concatenated."""
        return torch.cat([head(x) for head in self], dim=-1)

    def steps(self, x: Tensor) -> Steps:
        """Compute every step of every head: (h, t, t) or (b, h, t, t).

        The context is (..., h, t, d_out), before the heads are concatenated.
        """
        return stack_steps([head.steps(x) for head in self])


class MultiHeadAttention(nn.Module):
    """Many causal heads from one projection each for q, k and v: split by columns, joined and projected once more.

    Shapes: x (t, d_in) or (b, t, d_in), t at most context_length; the output (..., t, d_out); each head has d_out / num_heads.
    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        checks.check_sizes(d_in=d_in, d_out=d_out, context_length=context_length, num_heads=num_heads)
        if d_out % num_heads:
            raise ConfigError(heads.describe_indivisible_width("d_out", d_out, "num_heads", num_heads))
        self.d_in, self.context_length, self.num_heads = d_in, context_length, num_heads
        qkv_bias = checks.check_bias_flag(qkv_bias)
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = Linear(d_out, d_out)
        self.dropout = nn.Dropout(check_probability(dropout))
        self.register_load_state_dict_pre_hook(checks.drop_mask_buffer)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, past: CacheUpdate | None = None, mask: Mask = EVERYTHING) -> Tensor:
        """Compute the output of each token, which sees the tokens before it that the mask lets it see.

        `past` prepends the keys and values of earlier calls, and returns their number as the offset.
        """
        q, k, v = self.project(x)  # (b, h, t, d)
        k, v, offset = (k, v, 0) if past is None else past(k, v)
        k, v = k.to(q.dtype), v.to(q.dtype)  # which may be stored in another
        context = attention(q, k, v, Causal() & mask, offset=offset, dropout=get_active_dropout(self.dropout))
        output: Tensor = self.out_proj(heads.join(context))
        return output

    def steps(self, x: Tensor) -> Steps:
        """Compute every step of every head: (h, t, t) or (b, h, t, t).

        The context is that before the heads are joined and projected.
        """
        return attend(*self.project(x), Causal(), dropout=get_active_dropout(self.dropout))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the queries, keys and values of each head."""
        checks.check_input(x, self.d_in, self.context_length, like=self.W_query)
        q, k, v = (heads.split(W(x), self.num_heads) for W in (self.W_query, self.W_key, self.W_value))
        return q, k, v

    @classmethod
    def from_stacked(cls, stacked: StackedHeads) -> "MultiHeadAttention":
        """Build a module that computes the same as the stacked heads; out_proj is the identity."""
        first = next(iter(check_instance("stacked", stacked, StackedHeads)))
        weight, bias = first.W_query.weight, first.W_query.bias is not None
        count, d_out = len(stacked.heads), len(stacked.heads) * len(weight)
        joined = make_uninitialized(lambda: cls(first.d_in, d_out, first.context_length, first.dropout.p, count, bias), weight)
        for name in PROJECTIONS:
            copy_rows([getattr(head, name) for head in stacked], [getattr(joined, name)])
        nn.init.eye_(joined.out_proj.weight)
        nn.init.zeros_(joined.out_proj.bias)
        return joined.train(stacked.training)

    def to_stacked(self) -> nn.Sequential:
        """Build stacked heads, followed by out_proj, that compute the same as this module."""
        weight, bias = self.W_query.weight, self.W_query.bias is not None
        settings = (self.d_in, len(weight) // self.num_heads, self.context_length, self.dropout.p, self.num_heads, bias)
        stacked = make_uninitialized(lambda: StackedHeads(*settings), weight)
        last = make_uninitialized(lambda: nn.Linear(len(weight), len(weight)), weight)
        for name in PROJECTIONS:
            copy_rows([getattr(self, name)], [getattr(head, name) for head in stacked])
        last.load_state_dict(self.out_proj.state_dict())
        return nn.Sequential(stacked, last).train(self.training)


def stack_steps(steps: Sequence[Steps]) -> Steps:
    """Stack the steps of several heads: a new axis for heads, before the last two."""
    return Steps(*(torch.stack(step, -3) for step in zip(*([x for _, x in one.items()] for one in steps), strict=True)))
