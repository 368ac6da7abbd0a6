"""The slice of a projection that each head comes from is found by norms, and said to be unknown where all norms are equal."""

import pytest
import torch
from torch import nn

from examination import wrong_calls
from examination.right_variants import NormedGroups
from regard.examination import examine
from regard.examination.call_reading.inner_calls import record_inner_calls


class Normed:
    """A norm of each head of queries and of keys, before they are rotated."""

    def __init__(self, norm):
        super().__init__()
        self.q_norm, self.k_norm = norm(6), norm(6)

    def place(self, q, k):
        return super().place(self.q_norm(q), self.k_norm(k))


MISTAKES = ["StylesMixed", "CosAndSinExchanged", "Opposite", "OfQueriesInKernel", "WithOtherBase", "KeysLater"]


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("mistake", [*MISTAKES, "Tiled"])
def test_mistakes_beside_norms_of_heads_are_found(mistake, norm):
    torch.manual_seed(0)
    layer = type(mistake, (Normed, getattr(wrong_calls, f"Rotary{mistake}")), {})(norm)
    kinds = [finding.kind for finding in examine(layer).findings]
    assert kinds == ["mixed heads" if mistake == "Tiled" else "wrong positions"]


def test_positions_and_heads_are_checked_beside_norms_of_heads():
    torch.manual_seed(0)
    what = [one.what for one in examine(NormedGroups()).checked]
    assert "heads are independent: 4 of width 6" in what
    assert any(one.startswith("rotary positions: 6 columns in pairs of columns i and i + d / 2") for one in what)


class NormedQueriesAndKeys(nn.Module):
    """Norms of queries and keys of each head, and a module after the softmax, whose output is (b, h, t, t)."""

    def __init__(self, after, softmax, h=4, d=6):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(h * d, h * d) for _ in range(4))
        self.norms = nn.ModuleList([nn.RMSNorm(d), nn.RMSNorm(d)])
        self.after, self.softmax, self.h = after, softmax, h

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = self.norms[0](q) @ self.norms[1](k).mT * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = self.after(self.softmax(scores.masked_fill(hidden, -torch.inf)))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def divide_exponentials(scores):
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("softmax", [nn.Softmax(-1), divide_exponentials])
@pytest.mark.parametrize("after", [nn.Identity(), nn.Dropout(0.0)])
@pytest.mark.parametrize("tokens", [6, 7])  # heads are 6 wide
def test_weights_are_no_source_of_keys_if_heads_are_as_wide_as_there_are_tokens(after, softmax, tokens):
    torch.manual_seed(0)
    layer = NormedQueriesAndKeys(after, softmax).eval()
    x = torch.randn(2, tokens, 24)
    (call,) = record_inner_calls(layer, lambda: layer(x)).calls
    assert {call.q_source.name, call.k_source.name} <= {"norms.0", "norms.1"}
    assert abs(call.scale - 6**-0.5) < 1e-5
    assert examine(layer, sample=x)
