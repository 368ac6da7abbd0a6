"""Additive attention: a small network scores each pair of query and key. Where attention came from."""

import torch
from torch import Tensor, nn

from regard.layers import checks
from regard.layers.one_head import without_heads
from regard.mechanism import EVERYTHING, Mask, Steps, scores
from regard.mechanism.request import ask, exactly
from regard.mechanism.steps import finish, restored


class AdditiveAttention(nn.Module):
    """softmax(weightᵀ tanh(W_query q + W_key k)) v.

    Shapes: queries (q, query_width) or (b, q, query_width); keys (..., k, key_width); values (..., k, e), the keys
    themselves where not given; the context (..., q, e). Without keys the queries attend to one another.
    Source: Bahdanau et al. 2014, section 3.1 and appendix A.1.2.
    """

    def __init__(self, query_width: int, key_width: int, hidden: int) -> None:
        super().__init__()
        checks.positive(query_width=query_width, key_width=key_width, hidden=hidden)
        self.W_query = nn.Linear(query_width, hidden, bias=False)
        self.W_key = nn.Linear(key_width, hidden, bias=False)
        self.weight = nn.Parameter(torch.empty(hidden).uniform_(-(hidden**-0.5), hidden**-0.5))  # as nn.Linear(hidden, 1)

    def forward(
        self, queries: Tensor, keys: Tensor | None = None, values: Tensor | None = None, mask: Mask = EVERYTHING
    ) -> Tensor:
        """The context of each query."""
        return self.steps(queries, keys, values, mask).context

    def steps(
        self, queries: Tensor, keys: Tensor | None = None, values: Tensor | None = None, mask: Mask = EVERYTHING
    ) -> Steps:
        """Every step of forward; the scores are the network's, and are not divided by anything."""
        keys = queries if keys is None else keys
        values = keys if values is None else values
        checks.fits(queries, self.W_query.in_features, name="queries")
        checks.fits(keys, self.W_key.in_features, name="keys")
        checks.fits(values, name="values")
        checks.same_rank(queries=queries, keys=keys, values=values)
        q, k, v = (x.unsqueeze(-3) for x in (self.W_query(queries), self.W_key(keys), values))  # one head
        request = ask(q, k, v.to(q.dtype), mask, scale=1.0)
        exact = scores.wide(q.dtype)
        with exactly(q.device):
            raw = scores.additive(request.q.to(exact), request.k.to(exact), self.weight.to(exact))
            return without_heads(restored(finish(raw, request), request))
