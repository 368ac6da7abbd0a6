"""Queries times a sum over tokens of keys times values are linear attention, with a head for each channel."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, D = 2, 7, 11, 5


class ChannelAttention(nn.Module):
    """Hydra attention (https://arxiv.org/abs/2209.07484) and AFT-Simple (https://arxiv.org/abs/2105.14103)."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.query, self.key, self.value = style, nn.Linear(C, D), nn.Linear(C, D), nn.Linear(C, D)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, keys and values, (b, t, d), as they are multiplied."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if "hydra" in self.style:
            return q / q.norm(dim=-1, keepdim=True), F.normalize(k, dim=-1), v
        return q.sigmoid(), k.softmax(1), v

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "AFT-Simple":
            q, k, v = self.query(x), self.key(x), self.value(x)
            weights = torch.mul(torch.softmax(k, 1), v).sum(dim=1, keepdim=True)
            return torch.mul(torch.sigmoid(q), weights)
        q, k, v = self.project(x)
        if self.style == "AFT-Simple, expanded":
            return (k * v).sum(1).unsqueeze(1).expand(-1, T, -1) * q
        if self.style == "hydra":
            kv = (k * v).sum(dim=-2, keepdim=True)
            return kv * q
        assert self.style == "hydra, a mean"
        return q * (k * v).mean(1)[:, None]


@pytest.mark.parametrize("style", ["hydra", "hydra, a mean", "AFT-Simple", "AFT-Simple, expanded"])
def test_each_channel_is_a_head_with_the_matrix_of_its_queries_and_keys(style):
    part, x = ChannelAttention(style), torch.randn(B, T, C)
    recording, output = record_and_compare(nn.Sequential(part), lambda model: model(x))
    assert [call.name for call in recording.calls] == ["0"]
    with torch.no_grad():
        q, k, v = part.project(x)
    expected = torch.einsum("bic,bjc->bcij", q, k) / (T if "mean" in style else 1)
    found = recording.map(0, kind="implicit")
    torch.testing.assert_close(found.dense(), expected, rtol=0, atol=EQUAL)
    torch.testing.assert_close(recording.values(0, kind="implicit").squeeze(-1), v.mT, rtol=0, atol=EQUAL)
    torch.testing.assert_close((found @ v.mT.unsqueeze(-1)).squeeze(-1).mT, output, rtol=0, atol=EQUAL)


def test_channels_of_an_image_are_heads_over_its_pixels():
    class OfPixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(C, 3 * D, 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, 1)
            return q.sigmoid() * (k.flatten(2).softmax(-1).view_as(k) * v).sum((2, 3), keepdim=True)

    part, x = OfPixels(), torch.randn(B, C, 3, 4)
    recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(x))
    with torch.no_grad():
        q, k, _ = (y.flatten(2) for y in part.project(x).chunk(3, 1))
    expected = q.sigmoid().unsqueeze(-1) * k.softmax(-1).unsqueeze(-2)
    torch.testing.assert_close(recording.map(0, kind="implicit").dense(), expected, rtol=0, atol=EQUAL)


class WithoutAttention(nn.Module):
    """Sums of products that multiply tokens, over features, heads or masked tokens, and gates of pooled tokens."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.project, self.squeeze, self.excite = style, nn.Linear(C, 3 * D), nn.Linear(D, 2), nn.Linear(2, D)
        self.rectify = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        if self.style == "a projection onto a vector":
            return q - (q * k).sum(-1, keepdim=True) * k
        if self.style == "gates by features":
            return v * (q.softmax(-1) * k).sum(-1, keepdim=True)
        if self.style == "a masked mean":
            mask = (x[..., :1] > 0).to(x.dtype).expand_as(q).contiguous()
            return v * ((q * mask).sum(1) / mask.sum(1).clamp(min=1)).unsqueeze(1)
        if self.style == "a variance":
            return q / ((q - q.mean(1, keepdim=True)) * (q - q.mean(1, keepdim=True))).mean(1, keepdim=True).add(1e-5).sqrt()
        if self.style == "squeeze and excitation":
            return q * self.excite(self.squeeze(q.mean(1, keepdim=True)).relu()).sigmoid()
        if self.style == "an excited pooling":
            return q * self.excite(self.squeeze((k.softmax(1) * v).sum(1, keepdim=True)).relu()).sigmoid()
        if self.style == "what a projection over tokens leaves":
            return v - q * (v * k).sum(1, keepdim=True)
        if self.style == "a mean over the batch":
            return q * (k * v).mean(0, keepdim=True)
        if self.style == "a mean over the batch of vectors":
            q, k, v = self.project(x[:, 0]).chunk(3, -1)
            return q * (k * v).mean(0)
        if self.style == "an image, over channels and rows":
            q, k, v = (y.view(B, D, T, 1) for y in self.project(x).mT.contiguous().chunk(3, 1))
            return q * (k * v).sum((1, 2), keepdim=True)
        if self.style == "a gate in place":
            return q * (k * v).mean(1, keepdim=True).sigmoid_()
        if self.style == "a rectified gate in place":
            return q * self.rectify((k.softmax(1) * v).sum(1, keepdim=True))
        assert self.style == "pooling with a row for each channel"
        return (k.softmax(1) * v).sum(1)


@pytest.mark.parametrize(
    "style",
    [
        *("a projection onto a vector", "gates by features", "a masked mean", "a variance", "squeeze and excitation"),
        *("an excited pooling", "pooling with a row for each channel", "what a projection over tokens leaves"),
        *("a mean over the batch", "a mean over the batch of vectors", "an image, over channels and rows", "a gate in place"),
        "a rectified gate in place",
    ],
)
def test_other_sums_of_products_are_neither_recorded_nor_missed(style):
    recording, _ = record_and_compare(nn.Sequential(WithoutAttention(style)), lambda model: model(torch.randn(B, T, C)))
    assert not recording.calls


class BesideNestedTensor(nn.Module):
    """Attention, and a gate that sums products of two layers, in a module with a nested tensor among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.one, self.other = nn.Linear(C, 3 * D), nn.Linear(C, D), nn.Linear(C, D)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        one, other = self.one(x), self.other(x)
        self.weights = (q @ k.mT / 3).softmax(-1)
        return self.weights @ v + (one * other).sum(-1, keepdim=True)


class OfNestedTensor(nn.Module):
    """A sum over the tokens of a nested tensor, or over its features, as PyTorch has them for its layouts."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.axis, self.one, self.other = 1 if layout is torch.jagged else -1, nn.Linear(C, D), nn.Linear(C, D)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x), self.other(x)
        return (one * other).sum(self.axis, keepdim=self.axis < 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_alone(layout):
    memory = torch.nested.nested_tensor([torch.randn(3, C), torch.randn(4, C)], layout=layout)
    part = BesideNestedTensor()
    recording, _ = record_and_compare(nn.ModuleList([part]), lambda model: model[0](torch.randn(B, T, C), memory))
    torch.testing.assert_close(recording.map(0).dense().squeeze(1), part.weights, rtol=0, atol=EQUAL)
    recording, _ = record_and_compare(nn.ModuleList([OfNestedTensor(layout)]), lambda model: model[0](memory))
    assert not recording.calls


def test_an_image_summed_over_channels_is_no_attention_of_tokens():
    class OfChannels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(T, 3 * T, 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, 1)
            return q * (k * v).mean((1, 2), keepdim=True)

    recording, _ = record_and_compare(nn.Sequential(OfChannels()), lambda model: model(torch.randn(B, T, T, 1)))
    assert not recording.calls


class OfTemporaries(ChannelAttention):
    """Keys and values that the module does not keep until queries multiply the sum."""

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "inline":
            return self.query(x) * (self.key(x) * self.value(x)).sum(1, keepdim=True)
        k, v = self.key(x), self.value(x)
        k = k * v
        return self.query(x) * k.mean(1, keepdim=True)


@pytest.mark.parametrize("style", ["inline", "rebound"])
def test_keys_that_were_freed_are_missed(style):
    part, x = nn.Sequential(OfTemporaries(style)), torch.randn(B, T, C)
    with torch.no_grad():
        recording, _ = record_and_compare(part, lambda model: model(x), missing=True)
    assert [one.module for one in recording.missed] == ["0"]
    assert "whose keys or values were freed before queries were multiplied with the sum" in recording.missed[0].reason
    recording, output = record_and_compare(part, lambda model: model(x))  # the graph of autograd holds them
    found = recording.map(0, kind="implicit") @ recording.values(0, kind="implicit")
    torch.testing.assert_close(found.squeeze(-1).mT, output, rtol=0, atol=EQUAL)


class ManySums(nn.Module):
    """Gates by sums of products of layers, or of a softmax with the tokens, that no queries multiply."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.key, self.value, self.alive = style, nn.Linear(C, C), nn.Linear(C, C), 0

    def forward(self, x: Tensor) -> Tensor:
        references, gates = [], []
        for _ in range(4):
            k, v = self.key(x), self.value(x)
            k = k.softmax(1) if "softmax" in self.style else k
            product = k * v
            references += [weakref.ref(k), weakref.ref(v)]
            x = x + product if self.style == "a softmax as a gate" else x * product.mean(1, keepdim=True).tanh()
            gates.append(product)
        del k, v
        self.alive = sum(one() is not None for one in references)
        return x


@pytest.mark.parametrize("style", ["products", "a softmax", "a softmax as a gate"])
def test_keys_and_values_of_other_sums_are_freed(style):
    part = ManySums(style)
    with torch.no_grad():
        record_and_compare(nn.Sequential(part), lambda model: model(torch.randn(B, T, C)))
    assert part.alive == 0
