"""Weights that a token predicts of the tokens around it, or of places that it samples, are recorded: a row for each token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, T, C, H, K = 2, 7, 12, 3, 5


class DynamicConvolution(nn.Module):
    """As fairseq writes it, tokens first. https://arxiv.org/abs/1901.10430"""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.num_heads, self.weigh = style, H, nn.Linear(C, H * K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)  # (t, b, c)
        weights = F.softmax(self.weigh(x).view(T * B * H, K), dim=1)
        self.weights = weights.detach()
        padded = F.pad(x, (0, 0, 0, 0, K - 1, 0))
        if self.style == "strided":
            windows = padded.as_strided((T, B, C, K), (B * C, C, 1, B * C)).view(T * B * H, C // H, K)
        else:
            windows = padded.unfold(0, K, 1).reshape(T * B * H, C // H, K)
        if self.style == "summed":
            return (windows * weights.unsqueeze(1)).sum(-1).view(T, B, C).transpose(0, 1)
        return torch.bmm(windows, weights.unsqueeze(2)).view(T, B, C).transpose(0, 1)


@pytest.mark.parametrize("style", ["strided", "unfolded", "summed"])
def test_a_dynamic_convolution_has_a_row_of_weights_for_each_token(style):
    part = DynamicConvolution(style)
    recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(torch.randn(B, T, C)))
    (call,) = recording.calls
    assert call.name == "0"
    found = call.map.dense()
    assert found.shape == (T * B, H, 1, K)
    torch.testing.assert_close(found.reshape(T * B * H, K), part.weights, rtol=0, atol=EQUAL)


class DeformableAttention(nn.Module):
    """The function of Deformable DETR in PyTorch, of two levels. https://arxiv.org/abs/2010.04159"""

    LEVELS, POINTS, SHAPES = 2, 2, ((3, 4), (2, 2))

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, count = H, H * self.LEVELS * self.POINTS
        self.offsets, self.weigh, self.value = nn.Linear(C, 2 * count), nn.Linear(C, count), nn.Linear(C, C)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        n = x.shape[1]
        value = self.value(image).view(B, -1, H, C // H)
        places = self.offsets(x).view(B, n, H, self.LEVELS, self.POINTS, 2).sigmoid()
        weights = F.softmax(self.weigh(x).view(B, n, H, self.LEVELS * self.POINTS), -1)
        self.weights = weights.detach().transpose(1, 2)
        weights = weights.view(B, n, H, self.LEVELS, self.POINTS)
        values, sampled = value.split([rows * columns for rows, columns in self.SHAPES], dim=1), []
        for level, (rows, columns) in enumerate(self.SHAPES):
            of_level = values[level].flatten(2).transpose(1, 2).reshape(B * H, C // H, rows, columns)
            grid = (2 * places - 1)[:, :, :, level].transpose(1, 2).flatten(0, 1)
            sampled.append(F.grid_sample(of_level, grid, align_corners=False))
        weights = weights.transpose(1, 2).reshape(B * H, 1, n, self.LEVELS * self.POINTS)
        output = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1).view(B, C, n)
        return output.transpose(1, 2).contiguous()


def test_deformable_attention_has_the_weights_of_the_places_that_each_query_samples():
    part, image = DeformableAttention(), torch.randn(B, 16, C)
    recording, _ = record_and_compare(nn.ModuleList([part]), lambda model: model[0](torch.randn(B, T, C), image))
    (call,) = recording.calls
    found = call.map.dense()
    assert found.shape == (B * T, H, 1, 4)
    torch.testing.assert_close(found.view(B, T, H, 4).transpose(1, 2), part.weights, rtol=0, atol=EQUAL)


class WithoutAttention(nn.Module):
    """Windows and samples without weights that tokens predict, and weights of what is neither."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.weight, self.score = style, nn.Parameter(torch.randn(K)), nn.Linear(C, K)
        self.value = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, K - 1, 0)).unfold(1, K, 1)  # (b, t, c, k)
        if self.style == "a light convolution":
            return windows @ self.weight.softmax(0)
        if self.style == "patches":
            return F.unfold(x[:, None, :6], (3, 4), stride=(3, 4)).mean(-1)
        if self.style == "a warped image":
            grid = self.score(x)[..., :2].tanh().unsqueeze(1)
            return F.grid_sample(x[:, None], grid, align_corners=False) * x.mean()
        if self.style == "windows of features":
            return (F.pad(x, (2, 2)).unfold(-1, K, 1) @ self.score(x).softmax(-1).unsqueeze(-1)).squeeze(-1)
        if self.style == "windows of features of a layer":
            return torch.einsum("btk,btck->btc", self.score(x).softmax(-1), F.pad(self.value(x), (2, 2)).unfold(2, K, 1))
        if self.style == "a filter for each sample":
            return torch.einsum("bk,btck->btc", self.score(x.mean(1)).softmax(-1), windows)
        if self.style == "a gate of channels":
            image, grid = x[:, :K, None], F.affine_grid(torch.eye(2, 3).expand(B, 2, 3), (B, K, 1, C), align_corners=False)
            sampled = F.grid_sample(image, grid, align_corners=False)
            return (self.score(x.mean(1)).softmax(-1)[:, :, None, None] * sampled).sum(1, keepdim=True)
        assert self.style == "depths"
        weights = self.score(x).softmax(-1)
        return (weights * torch.linspace(0, 1, K)).sum(-1), weights @ torch.linspace(0, 1, K)


@pytest.mark.parametrize(
    "style",
    [
        *(
            "a light convolution",
            "patches",
            "a warped image",
            "depths",
            "windows of features",
            "windows of features of a layer",
        ),
        *("a filter for each sample", "a gate of channels"),
    ],
)
def test_other_windows_and_samples_are_neither_recorded_nor_missed(style):
    recording, _ = record_and_compare(nn.Sequential(WithoutAttention(style)), lambda model: model(torch.randn(B, T, C)))
    assert not recording.calls


class WeightedInPlace(nn.Module):
    """Values that are overwritten before their products with weights are summed."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, self.weigh, self.project = style, nn.Linear(C, K), nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "windows":
            windows = F.pad(x, (0, 0, K - 1, 0)).unfold(1, K, 1).clone()
            return windows.mul_(self.weigh(x).softmax(-1).unsqueeze(-2)).sum(-1)
        q, k, v = self.project(x).chunk(3, -1)
        values = v.unsqueeze(1).clone()
        weights = (q @ k.mT).softmax(-1).unsqueeze(-1)
        assert self.style == "values"
        weighted = values * weights
        values.zero_()
        return weighted.sum(2)


@pytest.mark.parametrize("style", ["windows", "values"])
def test_values_that_were_overwritten_are_missed(style):
    with torch.no_grad():
        part = nn.Sequential(WeightedInPlace(style))
        recording, _ = record_and_compare(part, lambda model: model(torch.randn(B, T, C)), missing=True)
    assert not recording.calls
    assert len(recording.missed) == 1


class WindowAttention(nn.Module):
    """Attention of each pixel, or each token, to those around it. https://arxiv.org/abs/1906.05909"""

    def __init__(self, axes: int) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d)[axes - 1]
        self.axes, self.query, self.key, self.value = axes, *(convolution(C, C, 1) for _ in range(3))

    def unfold(self, x: Tensor) -> Tensor:
        x = F.pad(x, [1] * 2 * self.axes)
        for n in range(self.axes):
            x = x.unfold(2 + n, 3, 1)
        return x.flatten(2 + self.axes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.unfold(self.key(x)), self.unfold(self.value(x))
        weights = (q.unsqueeze(-1) * k).sum(1, keepdim=True).softmax(-1)
        self.weights = weights.detach()
        return (weights * v).sum(-1)


@pytest.mark.parametrize("axes", [1, 2])
def test_windows_of_keys_and_values_are_self_attention(axes):
    part = WindowAttention(axes)
    x = torch.randn(B, C, *(4, 5)[:axes])
    recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(x))
    (call,) = recording.calls
    found = call.map.dense()
    assert call.kind == "self"
    assert ["each query has keys and values of its own" in note for note in recording.notes] == [True]
    torch.testing.assert_close(found.flatten(), part.weights.flatten(), rtol=0, atol=EQUAL)
