"""External attention, whose values are memories that all inputs share, is reported as missed; one softmax over codes is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import record_and_compare

B, T, C, S, ROWS = 2, 15, 6, 7, 3


class External(nn.Module):
    """Weights of tokens and learned memories, which a layer or a product multiplies. https://arxiv.org/abs/2105.02358"""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.keys, self.values = form, nn.Linear(C, S, bias=False), nn.Linear(S, C)
        self.memory, self.to_image = nn.Parameter(torch.randn(S, C)), nn.Conv1d(S, C, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "image":
            weights = self.keys(x.flatten(2).mT).mT.softmax(-1)
            return self.to_image(weights / (1e-9 + weights.sum(1, keepdim=True))).view(x.shape)
        weights = self.keys(x).softmax(1)
        if self.form == "layer":
            return self.values(weights / weights.sum(2, keepdim=True))
        return F.normalize(weights, p=1, dim=-1) @ self.memory


@pytest.mark.parametrize("form", ["layer", "image", "product"])
def test_external_attention_is_missed(form):
    x = torch.randn(B, C, ROWS, T // ROWS) if form == "image" else torch.randn(B, T, C)
    recording, _ = record_and_compare(nn.Sequential(External(form)), lambda m: m(x), missing=True)
    assert not recording.calls
    assert [one.module for one in recording.missed] == ["0"]
    assert "whose weights are a softmax over the tokens" in recording.missed[0].reason


class Codes(nn.Module):
    """Learned codes by one softmax, over the codes or over the tokens, which is no attention."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.keys, self.values = dim, nn.Linear(C, S, bias=False), nn.Linear(S, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.keys(x).softmax(self.dim))


@pytest.mark.parametrize("dim", [1, -1])
def test_codes_by_one_softmax_are_not_missed(dim):
    recording, _ = record_and_compare(nn.Sequential(Codes(dim)), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls
    assert not recording.missed
