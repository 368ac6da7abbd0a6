"""Self-attention with trainable weights, as plain parameters or as linear layers: the same function."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.layers import checks
from regard.layers.simple import compute_head_context, compute_head_steps
from regard.mechanism import Steps

Layer = TypeVar("Layer", bound=nn.Module)


class BareSelfAttention(nn.Module):
    """softmax(q kᵀ / √d) v with q = x W_query, k = x W_key, v = x W_value; the weights (d_in, d_out) from torch.rand.

    Shapes: x (t, d_in) or (b, t, d_in); the context (t, d_out) or (b, t, d_out).
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        checks.check_sizes(d_in=d_in, d_out=d_out)
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context of each token."""
        return compute_head_context(*self.project(x))

    def steps(self, x: Tensor) -> Steps:
        """Compute every step of forward."""
        return compute_head_steps(*self.project(x))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the queries, keys and values of each token."""
        checks.check_input(x, self.W_query.shape[0], like=self.W_query)
        return x @ self.W_query, x @ self.W_key, x @ self.W_value

    def to_linear(self) -> "SelfAttention":
        """Convert to linear layers, whose weights are stored transposed: (d_out, d_in)."""
        d_in, d_out = self.W_query.shape
        linear = make_uninitialized(lambda: SelfAttention(d_in, d_out), self.W_query)
        with torch.no_grad():
            linear.W_query.weight.copy_(self.W_query.T)
            linear.W_key.weight.copy_(self.W_key.T)
            linear.W_value.weight.copy_(self.W_value.T)
        return linear.train(self.training)


class SelfAttention(nn.Module):
    """softmax(q kᵀ / √d) v, with projections by linear layers.

    Shapes: x (t, d_in) or (b, t, d_in); the context (t, d_out) or (b, t, d_out).
    """

    def __init__(self, d_in: int, d_out: int, qkv_bias: bool = False) -> None:
        super().__init__()
        checks.check_sizes(d_in=d_in, d_out=d_out)
        qkv_bias = checks.check_bias_flag(qkv_bias)
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the context of each token."""
        return compute_head_context(*self.project(x))

    def steps(self, x: Tensor) -> Steps:
        """Compute every step of forward."""
        return compute_head_steps(*self.project(x))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the queries, keys and values of each token."""
        checks.check_input(x, self.W_query.in_features, like=self.W_query)
        return self.W_query(x), self.W_key(x), self.W_value(x)

    def to_bare(self) -> BareSelfAttention:
        """Convert to plain parameters (d_in, d_out), or raise ConfigError if there is a bias."""
        if self.W_query.bias is not None:
            raise ConfigError("plain parameters have no bias; create the layer with qkv_bias=False.")
        d_out, d_in = self.W_query.weight.shape
        bare = make_uninitialized(lambda: BareSelfAttention(d_in, d_out), self.W_query.weight)
        with torch.no_grad():
            bare.W_query.copy_(self.W_query.weight.T)
            bare.W_key.copy_(self.W_key.weight.T)
            bare.W_value.copy_(self.W_value.weight.T)
        return bare.train(self.training)


def make_uninitialized(make: Callable[[], Layer], like: Tensor) -> Layer:
    """Return a layer with uninitialized weights, of the dtype and device of a tensor; no random numbers are drawn."""
    with torch.device("meta"):
        layer = make()
    return layer.to_empty(device=like.device).to(like.dtype)


def copy_rows(sources: Sequence[nn.Linear], targets: Sequence[nn.Linear]) -> None:
    """Copy the concatenated rows of some linear layers into those of others."""
    with torch.no_grad():
        for name in ("weight", "bias") if sources[0].bias is not None else ("weight",):
            rows = torch.cat([getattr(source, name) for source in sources])
            for target, part in zip(targets, rows.chunk(len(targets)), strict=True):
                getattr(target, name).copy_(part)
