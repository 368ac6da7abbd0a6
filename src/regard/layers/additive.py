"""Additive attention: a small network scores each pair of query and key. The first form of attention."""

import torch
from torch import Tensor, nn

from regard.layers import checks
from regard.layers.simple import remove_head_axis
from regard.mechanism import EVERYTHING, Mask, Steps
from regard.mechanism.additive import additive_attention, attend_additive


class AdditiveAttention(nn.Module):
    """softmax(weightᵀ tanh(W_query q + W_key k)) v.

    Shapes: queries (q, query_width) or (b, q, query_width); keys (..., k, key_width); values (..., k, e), by default the keys;
    the context (..., q, e). Without keys the queries attend to one another.
    Source: Bahdanau et al. 2014, section 3.1 and appendix A.1.2.
    """

    def __init__(self, query_width: int, key_width: int, hidden: int) -> None:
        super().__init__()
        checks.check_sizes(query_width=query_width, key_width=key_width, hidden=hidden)
        self.W_query = nn.Linear(query_width, hidden, bias=False)
        self.W_key = nn.Linear(key_width, hidden, bias=False)
        self.weight = nn.Parameter(torch.empty(hidden).uniform_(-(hidden**-0.5), hidden**-0.5))  # as nn.Linear(hidden, 1)

    def forward(
        self, queries: Tensor, keys: Tensor | None = None, values: Tensor | None = None, mask: Mask = EVERYTHING
    ) -> Tensor:
        """Compute the context of each query."""
        keys, values = fill_keys_and_values(queries, keys, values)
        return self.attend_projected(queries, self.project(keys), values, mask)

    def project(self, keys: Tensor) -> Tensor:
        """Compute W_key k for `over`; queries that come one after the other share it."""
        checks.check_input(keys, self.W_key.in_features, name="keys", like=self.W_key)
        k: Tensor = self.W_key(keys)
        return k.to(self.W_key.weight.dtype)  # undo torch.autocast: the gradients of many queries are summed in this dtype

    def attend_projected(self, queries: Tensor, projected: Tensor, values: Tensor, mask: Mask = EVERYTHING) -> Tensor:
        """Compute the context of each query, from keys that `project` has projected."""
        return additive_attention(*self.arrange_inputs(queries, projected, values), self.weight, mask).squeeze(-3)

    def steps(
        self, queries: Tensor, keys: Tensor | None = None, values: Tensor | None = None, mask: Mask = EVERYTHING
    ) -> Steps:
        """Compute every step of forward; the scores are not scaled."""
        keys, values = fill_keys_and_values(queries, keys, values)
        return remove_head_axis(attend_additive(*self.arrange_inputs(queries, self.project(keys), values), self.weight, mask))

    def arrange_inputs(self, queries: Tensor, projected: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return projected queries and keys, and values, in one dtype and as one head."""
        checks.check_input(queries, self.W_query.in_features, name="queries", like=self.W_query)
        checks.check_input(projected, self.W_query.out_features, name="projected keys")
        checks.check_input(values, name="values")
        checks.check_same_rank(queries=queries, keys=projected, values=values)
        q, k, v = (x.to(projected.dtype).unsqueeze(-3) for x in (self.W_query(queries), projected, values))
        return q, k, v


def fill_keys_and_values(queries: Tensor, keys: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values: keys default to the queries, values to the keys."""
    keys = queries if keys is None else keys
    values = keys if values is None else values
    for name, x in (("queries", queries), ("keys", keys), ("values", values)):
        checks.check_input(x, name=name)
    checks.check_same_rank(queries=queries, keys=keys, values=values)
    return keys, values
