"""Attention written out on nested tensors is missed, and recorded where it runs sequence by sequence."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare
from regard.observe.interception.handwritten.nested_weights import NESTED

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
LENGTHS, H, D, EXPERTS = (4, 7, 2), 2, 3, 5
C = H * D


class Ragged(nn.Module):
    """Attention, pooling and a router on nested tensors, all by hand."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.dropout, self.score, self.router = style, nn.Dropout(0.0), nn.Linear(C, 1), nn.Linear(C, EXPERTS)
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))

    def split(self, layer: nn.Module, x: Tensor) -> Tensor:
        parts = [layer(one).unflatten(-1, (H, D)).transpose(0, 1).contiguous() for one in x.unbind()]
        return torch.nested.nested_tensor(parts)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "pooling":
            return (torch.softmax(self.score(x), 1) * x).sum(1)
        if self.style == "a router":
            return torch.softmax(self.router(x), -1) * 2
        if self.style == "one by one":
            scores = [self.q(one) @ self.k(one).mT / math.sqrt(C) for one in x.unbind()]
            self.weights = [one.softmax(-1) for one in scores]
            return torch.cat([weights @ self.v(one) for weights, one in zip(self.weights, x.unbind(), strict=True)])
        q, k, v = (self.split(layer, x) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D)
        weights = nn.Softmax(-1)(scores) if self.style == "modules" else F.softmax(scores, dim=-1)
        return torch.matmul(self.dropout(weights) if self.style == "modules" else weights, v)


def run(model: nn.Module) -> Tensor:
    layout = torch.jagged if model.style in ("pooling", "a router") else torch.strided
    generator = torch.Generator().manual_seed(3)
    x = torch.nested.nested_tensor([torch.randn(n, C, generator=generator) for n in LENGTHS], layout=layout)
    y = model(x)
    return torch.cat([one.flatten() for one in y.unbind()]) if y.is_nested else y


@pytest.mark.parametrize("style", ["functions", "modules", "pooling"])
def test_attention_by_hand_on_nested_tensors_is_missed(style):
    recording, _ = record_and_compare(Ragged(style).eval(), run, missing=True)
    assert not recording.calls
    assert [one.reason for one in recording.missed] == [NESTED]


def test_a_router_of_nested_tokens_is_no_attention():
    recording, _ = record_and_compare(Ragged("a router"), run)
    assert not recording.calls


def test_attention_to_one_sequence_after_the_other_is_recorded():
    recording, _ = record_and_compare(model := Ragged("one by one"), run)
    assert len(recording.calls) == len(LENGTHS)
    for call, weights in zip(recording.calls, model.weights, strict=True):
        torch.testing.assert_close(call.map.dense()[0, 0], weights.detach(), rtol=0, atol=EQUAL)
