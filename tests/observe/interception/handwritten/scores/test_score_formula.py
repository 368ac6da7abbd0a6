"""Queries that were picked from those of all tokens are no next tokens of a cache, though there are fewer than keys."""

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, H, T, D, TOP = 2, 3, 11, 5, 4


class ProbabilisticAttention(nn.Module):
    """The queries whose scores differ most attend, and the others get the mean or the running sum. https://arxiv.org/abs/2012.07436"""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(H * D, H * D) for _ in range(3))
        self.is_causal, self.weights = is_causal, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(B, T, H, D).transpose(1, 2) for f in (self.query, self.key, self.value))
        sampled = k.unsqueeze(-3).expand(-1, -1, T, -1, -1)[:, :, torch.arange(T).unsqueeze(1), torch.randint(T, (T, TOP)), :]
        scores = torch.matmul(q.unsqueeze(-2), sampled.transpose(-2, -1)).squeeze(-2)
        sparsity = scores.max(-1)[0] - scores.sum(-1) / T
        top = sparsity[..., : T - 2].topk(TOP, sorted=False)[1]  # none of the last tokens, so that no query sees the last keys
        place = torch.arange(B)[:, None, None], torch.arange(H)[None, :, None], top
        scores = torch.matmul(q[(*place, slice(None))], k.transpose(-2, -1)) / D**0.5
        if self.is_causal:
            later = torch.ones(T, T).triu(1).bool().expand(B, H, T, T)
            scores.masked_fill_(later[(*place, slice(None))], -torch.inf)
        weights = torch.softmax(scores, -1)
        self.weights = weights.detach()
        context = v.cumsum(-2) if self.is_causal else v.mean(-2, keepdim=True).expand(-1, -1, T, -1).clone()
        context[(*place, slice(None))] = torch.matmul(weights, v)
        return context.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_map_of_picked_queries_has_all_keys(is_causal):
    part = ProbabilisticAttention(is_causal)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(torch.randn(B, T, H * D)))
    torch.testing.assert_close(recording.map(0).dense(), part.weights, rtol=0, atol=EQUAL)
    assert ["an index picked its queries" in note for note in recording.notes] == [True]
