"""Many causal heads: stacked one beside the other, or as one module whose projections are split; each turned into the other."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.layers import checks
from regard.layers.causal import CausalAttention, dropped
from regard.layers.conversion import blank, copy_rows
from regard.layers.linear import Linear
from regard.mechanism import EVERYTHING, Causal, Mask, Steps, attend, attention, heads
from regard.mechanism.arguments import check_instance
from regard.mechanism.request import probability
from regard.mechanism.rule import Offset

Past = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Offset]]  # new keys and values to all of them, and the offset
PROJECTIONS = ("W_query", "W_key", "W_value")
MOST_HEADS = 2**16  # that stand side by side


class StackedHeads(nn.Module):
    """Causal attention several times over, the contexts side by side; d_out is the width of each head.

    Shapes: x (t, d_in) or (b, t, d_in); the context (..., t, num_heads d_out).
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        checks.positive(num_heads=num_heads)
        if num_heads > MOST_HEADS:
            raise ConfigError(f"num_heads must be at most {MOST_HEADS:,}, each of them a module; got {num_heads:,}.")
        self.heads = nn.ModuleList(CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads))

    def __iter__(self) -> Iterator[CausalAttention]:
        """The heads in order."""
        return (cast(CausalAttention, head) for head in self.heads)

    def forward(self, x: Tensor) -> Tensor:
        """The contexts of all heads, side by side."""
        return torch.cat([head(x) for head in self], dim=-1)

    def steps(self, x: Tensor) -> Steps:
        """Every step of every head: (h, t, t) or (b, h, t, t); the context (..., h, t, d_out), not yet side by side."""
        return stacked([head.steps(x) for head in self])


class MultiHeadAttention(nn.Module):
    """Many causal heads from one projection each for q, k and v, split by columns, joined and projected once more.

    Shapes: x (t, d_in) or (b, t, d_in), t at most context_length; the output (..., t, d_out); each head has d_out / num_heads.
    Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        checks.positive(d_in=d_in, d_out=d_out, context_length=context_length, num_heads=num_heads)
        if d_out % num_heads:
            raise ConfigError(heads.indivisible("d_out", d_out, "num_heads", num_heads))
        self.d_in, self.context_length, self.num_heads = d_in, context_length, num_heads
        qkv_bias = checks.has_bias(qkv_bias)
        self.W_query = Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = Linear(d_out, d_out)
        self.dropout = nn.Dropout(probability(dropout))
        self.register_load_state_dict_pre_hook(checks.without_masks)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor, past: Past | None = None, mask: Mask = EVERYTHING) -> Tensor:
        """The output of each token, which sees those before it that the mask lets it see.

        `past` puts keys and values of earlier calls before these, and says how many.
        """
        q, k, v = self.project(x)  # (b, h, t, d)
        k, v, offset = (k, v, 0) if past is None else past(k, v)
        context = attention(q, k, v, Causal() & mask, offset=offset, dropout=dropped(self.dropout))
        output: Tensor = self.out_proj(heads.join(context))
        return output

    def steps(self, x: Tensor) -> Steps:
        """Every step of every head: (h, t, t) or (b, h, t, t); the context before the heads are joined and projected."""
        return attend(*self.project(x), Causal(), dropout=dropped(self.dropout))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values of each head."""
        checks.fits(x, self.d_in, self.context_length, like=self.W_query)
        q, k, v = (heads.split(W(x), self.num_heads) for W in (self.W_query, self.W_key, self.W_value))
        return q, k, v

    @classmethod
    def from_stacked(cls, stacked: StackedHeads) -> "MultiHeadAttention":
        """The same function as the stacked heads; out_proj is the identity."""
        first = next(iter(check_instance("stacked", stacked, StackedHeads)))
        weight, bias = first.W_query.weight, first.W_query.bias is not None
        count, d_out = len(stacked.heads), len(stacked.heads) * len(weight)
        whole = blank(lambda: cls(first.d_in, d_out, first.context_length, first.dropout.p, count, bias), weight)
        for name in PROJECTIONS:
            copy_rows([getattr(head, name) for head in stacked], [getattr(whole, name)])
        nn.init.eye_(whole.out_proj.weight)
        nn.init.zeros_(whole.out_proj.bias)
        return whole.train(stacked.training)

    def to_stacked(self) -> nn.Sequential:
        """The same function as stacked heads, and out_proj after them."""
        weight, bias = self.W_query.weight, self.W_query.bias is not None
        settings = (self.d_in, len(weight) // self.num_heads, self.context_length, self.dropout.p, self.num_heads, bias)
        stacked = blank(lambda: StackedHeads(*settings), weight)
        last = blank(lambda: nn.Linear(len(weight), len(weight)), weight)
        for name in PROJECTIONS:
            copy_rows([getattr(self, name)], [getattr(head, name) for head in stacked])
        last.load_state_dict(self.out_proj.state_dict())
        return nn.Sequential(stacked, last).train(self.training)


def stacked(steps: Sequence[Steps]) -> Steps:
    """The steps of several heads as those of one module: a new axis for heads, before the last two."""
    return Steps(*(torch.stack(step, -3) for step in zip(*([x for _, x in one.items()] for one in steps), strict=True)))
