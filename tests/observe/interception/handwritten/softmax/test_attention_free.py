"""Attention whose scores are a number of two positions plus one of each channel of a key: a softmax for each channel."""

import pytest
import torch
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare
from regard import KnockOut
from regard.observe import record
from regard.observe.intervene import intervene

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D, RANK = 2, 7, 11, 5, 3


class AttentionFree(nn.Module):
    """https://arxiv.org/abs/2105.14103, as several repositories write it."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.query, self.key, self.value = style, nn.Linear(C, D), nn.Linear(C, D), nn.Linear(C, D)
        self.w = nn.Parameter(torch.randn(T, T))
        self.register_buffer("later", torch.ones(T, T).triu(1).bool())
        self.u, self.v = nn.Parameter(torch.randn(T, RANK)), nn.Parameter(torch.randn(T, RANK))

    @property
    def bias(self) -> Tensor:
        """The numbers of two positions, (t, t)."""
        if "factors" in self.style:
            return self.u @ self.v.T
        return self.w.masked_fill(self.later, -torch.inf) if "causal" in self.style else self.w

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, w = self.query(x), self.key(x), self.value(x), self.bias
        if "products" in self.style:
            weighted = torch.exp(w) @ torch.mul(torch.exp(k), v) / (torch.exp(w) @ torch.exp(k))
            return torch.sigmoid(q) * weighted
        if "time first" in self.style:
            q, k, v = (y.transpose(0, 1) for y in (q, k, v))
            w = w.unsqueeze(-1)
            e, p = torch.exp(k - k.max(dim=0, keepdim=True)[0]), torch.exp(w - w.max(dim=1, keepdim=True)[0])
            num, den = torch.einsum("ijb,jbd->ibd", p, e * v), torch.einsum("ijb,jbd->ibd", p, e)
            return (torch.sigmoid(q) * num / (den + 1e-300)).transpose(0, 1)
        assert "sums" in self.style
        e = torch.exp(k.unsqueeze(1) + w.unsqueeze(-1))
        if "first" in self.style:
            return torch.sigmoid(q) * (e / e.sum(2, keepdim=True) * v.unsqueeze(1)).sum(2)
        return torch.sigmoid(q) * ((e * v.unsqueeze(1)).sum(dim=2) / e.sum(dim=2))


def compute_weights(part: AttentionFree, x: Tensor) -> Tensor:
    """softmax(w_ij + k_jc) over the keys j, (b, c, q, k)."""
    return (part.bias + part.key(x).mT.unsqueeze(2)).softmax(-1)


PRODUCTS = ["products", "products of factors", "products, causal", "time first", "time first, causal"]
SUMS = {"sums": "implicit", "sums, divided first": "self"}


@pytest.mark.parametrize(("style", "kind"), [*((one, "self") for one in PRODUCTS), *SUMS.items()])
def test_each_channel_is_a_head_with_a_softmax_of_its_own(style, kind):
    part, x = AttentionFree(style), torch.randn(B, T, C)
    recording, _ = record_and_compare(nn.Sequential(part), lambda m: m(x), keep="values")
    torch.testing.assert_close(recording.map(0, kind=kind).dense(), compute_weights(part, x), rtol=0, atol=EQUAL)
    torch.testing.assert_close(recording.values(0, kind=kind).squeeze(-1), part.value(x).mT, rtol=0, atol=EQUAL)


@pytest.mark.parametrize("style", PRODUCTS)
def test_two_products_are_stored_as_keys_and_a_table_that_channels_share(style):
    recording, _ = record_and_compare(nn.Sequential(AttentionFree(style)), lambda m: m(torch.randn(B, T, C)))
    (call,) = recording.calls
    assert call.map.nbytes <= 8 * (B * D * T * 2 + T * T)
    assert not recording.notes
    assert ("causal" in style) == (", Causal()," in repr(call.map))


def test_a_channel_can_be_knocked_out():
    part, x = AttentionFree("products"), torch.randn(B, T, C)
    model = nn.Sequential(part)
    with intervene(model, KnockOut(layer=0, head=1)):
        changed = model(x)
    expected = model(x)
    expected[..., 1] = 0
    torch.testing.assert_close(changed, expected, rtol=0, atol=EQUAL)


def test_one_sequence_without_a_batch_is_recorded():
    part, x = AttentionFree("products"), torch.randn(T, C)
    with record(nn.Sequential(part)) as recording:
        part(x)
    torch.testing.assert_close(recording.map(0).dense()[0], compute_weights(part, x[None])[0], rtol=0, atol=EQUAL)


class WithoutAttention(nn.Module):
    """Exponentials of weights and of tokens in products that divide nothing, or something else."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project, self.w = style, nn.Linear(C, D), nn.Parameter(torch.randn(T, T))

    def forward(self, x: Tensor) -> Tensor:
        e = self.project(x).exp()
        if self.style == "a product":
            return self.w.exp() @ e
        if self.style == "a ratio of two products":
            return (self.w.exp() @ e) / (self.w.exp() @ e.flip(1))
        assert self.style == "the logarithm of a product"
        return (self.w.exp() @ e).log()


@pytest.mark.parametrize("style", ["a product", "a ratio of two products", "the logarithm of a product"])
def test_other_products_of_exponentials_are_no_attention(style):
    recording, _ = record_and_compare(nn.Sequential(WithoutAttention(style)), lambda m: m(torch.randn(B, T, C)))
    assert not recording.calls
