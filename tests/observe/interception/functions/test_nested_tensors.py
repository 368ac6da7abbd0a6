"""Attention on nested tensors, whose sequences have different lengths, has the map of padded ones with a mask."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from observe.recording_checks import EQUAL
from regard.observe.interception.functions.nested_tensors import read_nested_call
from regard.observe.interception.plain_tensors import UnreadableError

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
LENGTHS, H, D = (4, 7, 1), 2, 3
C = H * D


class Ragged(nn.Module):
    """Attention of each sequence to its own tokens, or to those of another one."""

    def __init__(self, layout: torch.layout, is_cross: bool) -> None:
        super().__init__()
        self.layout, self.is_cross = layout, is_cross
        self.q, self.k, self.v = (nn.Linear(C, C) for _ in range(3))

    def nest(self, parts: list[Tensor], offsets: Tensor) -> Tensor:
        heads = [x.unflatten(-1, (H, D)) for x in parts]
        if self.layout is torch.strided:
            return torch.nested.nested_tensor([x.transpose(0, 1).contiguous() for x in heads])
        return torch.nested.nested_tensor_from_jagged(torch.cat(heads), offsets).transpose(1, 2)

    def forward(self, sequences: list[Tensor], others: list[Tensor]) -> Tensor:
        offsets = torch.tensor([0, *map(len, sequences)]).cumsum(0)
        q, x, of_keys = self.nest([self.q(x) for x in sequences], offsets), sequences, offsets
        if self.is_cross:
            x, of_keys = others, torch.tensor([0, *map(len, others)]).cumsum(0)
        k, v = (self.nest([layer(one) for one in x], of_keys) for layer in (self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v)


def make_sequences(seed: int, lengths: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(n, C) for n in lengths]


def assert_weights(weights: Tensor, queries: list[Tensor], keys: list[Tensor], is_causal: bool = False) -> None:
    """Compare weights (b, h, q, k) with those of each pair of sequences (h, t, d) alone."""
    for own, q, k in zip(weights, queries, keys, strict=True):
        scores = q @ k.mT / math.sqrt(D)
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        torch.testing.assert_close(own[:, : q.shape[1], : k.shape[1]], scores.softmax(-1), rtol=0, atol=EQUAL)
        assert not own[:, : q.shape[1], k.shape[1] :].any()


CASES = [(torch.jagged, False), (torch.jagged, True), (torch.strided, False), (torch.strided, True)]


@torch.no_grad()
@pytest.mark.parametrize(("layout", "is_cross"), CASES, ids=str)
def test_each_sequence_has_the_weights_of_its_own_attention(layout, is_cross):
    model, sequences, others = Ragged(layout, is_cross), make_sequences(0, LENGTHS), make_sequences(1, LENGTHS[::-1])
    plain = model(sequences, others)
    with regard.record(model, keep="values") as recording:
        result = model(sequences, others)
    assert all(torch.equal(one, other) for one, other in zip(plain.unbind(), result.unbind(), strict=True))
    assert not recording.missed
    (call,) = recording.calls
    of_heads = [
        [layer(x).unflatten(-1, (H, D)).transpose(0, 1) for x in (others if is_cross and layer is not model.q else sequences)]
        for layer in (model.q, model.k, model.v)
    ]
    assert_weights(call.map.dense(), of_heads[0], of_heads[1])
    context = call.map @ recording.runs[0].values(0, kind=call.kind)
    for own, x in zip(context, result.unbind(), strict=True):
        torch.testing.assert_close(own[:, : x.shape[1]], x, rtol=0, atol=EQUAL)


@torch.no_grad()
@pytest.mark.parametrize(("layout", "is_cross"), CASES, ids=str)
def test_a_head_of_nested_tensors_can_be_knocked_out(layout, is_cross):
    model, sequences, others = Ragged(layout, is_cross), make_sequences(0, LENGTHS), make_sequences(1, LENGTHS[::-1])
    plain = model(sequences, others)
    with regard.record(model) as recording:
        model(sequences, others)
    with regard.intervene(model, regard.KnockOut(layer=0, head=0, kind=recording.calls[0].kind)):
        changed = model(sequences, others)
    assert changed.is_nested
    assert changed.layout is layout
    for before, after in zip(plain.unbind(), changed.unbind(), strict=True):
        assert not after[0].any()
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=EQUAL)


def test_causal_attention_hides_later_tokens_and_padding():
    """PyTorch has no kernel for it on a CPU, so the call is read without being run."""
    sequences = [x.unflatten(-1, (H, D)) for x in make_sequences(0, LENGTHS)]
    x = torch.nested.nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)
    call, _ = read_nested_call(lambda: x, (x, x, x), is_masked=False, is_causal=True, scale=None, has_separate_sources=False)
    heads = [one.transpose(0, 1) for one in sequences]
    assert_weights(call.build_map(call.k).dense(), heads, heads, is_causal=True)


def test_a_call_with_a_mask_is_unreadable():
    x = torch.nested.nested_tensor(make_sequences(0, LENGTHS), layout=torch.jagged)
    with pytest.raises(UnreadableError, match="has a mask"):
        read_nested_call(lambda: x, (x, x, x), is_masked=True, is_causal=False, scale=None, has_separate_sources=False)
