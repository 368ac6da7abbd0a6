"""Attention over windows that an index gathers or code cuts, rolls or writes, and over sampled places: a row for each query."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from observe.recording_checks import EQUAL, record_and_compare

pytestmark = pytest.mark.usefixtures("in_float64")
B, C, H, D, ROWS, COLUMNS, K, DILATION = 2, 6, 2, 3, 5, 7, 9, 2
T = ROWS * COLUMNS
SHIFTS = [(DILATION * i, DILATION * j) for i in (-1, 0, 1) for j in (-1, 0, 1)]


def find_neighbors() -> Tensor:
    """The places (t, k) of a dilated neighborhood, which moves inwards at the borders. https://arxiv.org/abs/2209.15001"""

    def find_along(size: int) -> Tensor:
        start = torch.arange(size) - DILATION
        start = torch.where(start < 0, start + DILATION, start)
        start = torch.where(start + 2 * DILATION >= size, start - DILATION, start).clamp(0, size - 1 - 2 * DILATION)
        return start[:, None] + DILATION * torch.arange(3)

    rows, columns = find_along(ROWS), find_along(COLUMNS)
    return (rows[:, None, :, None] * COLUMNS + columns[None, :, None, :]).reshape(T, K)


def pad(x: Tensor) -> Tensor:
    return F.pad(x, (DILATION,) * 4)


def cut(x: Tensor) -> list[Tensor]:
    """Padded copies (b, c, rows, columns), a place of the window each."""
    padded = pad(x)
    return [padded[..., DILATION + i : DILATION + i + ROWS, DILATION + j : DILATION + j + COLUMNS] for i, j in SHIFTS]


def write(x: Tensor) -> Tensor:
    windows = x.new_zeros(B, C, K, ROWS, COLUMNS)
    for n, one in enumerate(cut(x)):
        windows[:, :, n] = one
    return windows


def gather(x: Tensor) -> Tensor:
    index = find_neighbors().T.expand(B, C, K, T)
    return torch.gather(x.flatten(2).unsqueeze(2).expand(-1, -1, K, -1), 3, index)


def unfold(x: Tensor) -> Tensor:
    size = 2 * DILATION + 1
    return pad(x).unfold(2, size, 1).unfold(3, size, 1)[..., ::DILATION, ::DILATION].flatten(-2).movedim(-1, 2)


WINDOWS = {  # of x (b, c, rows, columns), as (b, c, k, ...)
    "an index": lambda x: x.flatten(2)[:, :, find_neighbors()].transpose(2, 3),
    "gather": gather,
    "F.unfold": lambda x: F.unfold(x, 3, DILATION, DILATION).view(B, C, K, T),
    "Tensor.unfold": unfold,
    "rolls": lambda x: torch.stack([x.roll(shift, (2, 3)) for shift in SHIFTS], 2),
    "written": write,
}


def multiply(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.einsum("bc...,bck...->bk...", q, k).softmax(1)
    return weights, torch.einsum("bk...,bck...->bc...", weights, v)


def add_up(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q.unsqueeze(2) * k).sum(1).softmax(1)
    return weights, (weights.unsqueeze(1) * v).sum(2)


def add_up_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.unflatten(1, (H, D)) for x in (q, k, v))
    weights = (q.unsqueeze(3) * k).sum(2).softmax(2)
    return weights, (weights.unsqueeze(2) * v).sum(3).flatten(1, 2)


def add_up_features(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.movedim(1, -1) for x in (q, k, v))
    weights = (q.unsqueeze(1) * k).sum(-1).softmax(1)
    return weights, (weights.unsqueeze(-1) * v).sum(1).movedim(-1, 1)


FORMS = {"einsum": multiply, "sums": add_up, "sums of heads": add_up_heads, "sums, features last": add_up_features}


class Neighborhood(nn.Module):
    """Attention of each pixel to those of its window."""

    def __init__(self, gather_windows, attend) -> None:
        super().__init__()
        self.gather_windows, self.attend = gather_windows, attend
        self.query, self.key, self.value = (nn.Conv2d(C, C, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.gather_windows(self.key(x)), self.gather_windows(self.value(x))
        q = self.query(x).view(B, C, *k.shape[3:])
        weights, context = self.attend(q, k, v)
        self.weights = weights.detach()
        return context.reshape(x.shape)


@pytest.mark.parametrize(
    ("windows", "form", "is_inference"), [(one, form, n % 2 == 0) for n, one in enumerate(WINDOWS) for form in FORMS]
)
def test_attention_over_gathered_windows_has_a_row_for_each_query(windows, form, is_inference):
    part = Neighborhood(WINDOWS[windows], FORMS[form])
    x = torch.randn(B, C, ROWS, COLUMNS)
    with torch.inference_mode(is_inference):
        recording, y = record_and_compare(nn.Sequential(part), lambda model: model(x), keep="values")
        (call,) = recording.calls
        assert call.kind == "self"
        rows, values = call.map.dense(), recording.values(0)
    heads = H if form == "sums of heads" else 1
    weights = part.weights.reshape(B, heads, K, T).transpose(2, 3)
    assert rows.shape[2:] == (1, K)
    torch.testing.assert_close(rows.flatten(0, 2).sort(0).values, weights.flatten(0, 2).sort(0).values, rtol=0, atol=EQUAL)
    context, expected = (rows @ values).flatten().sort().values, y.flatten().sort().values
    torch.testing.assert_close(context, expected, rtol=0, atol=EQUAL)


class Attend(nn.Module):
    """Attention to windows that the module around it gathered."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return add_up(q, k, v.contiguous())


@pytest.mark.parametrize("windows", ["gather", "rolls"])
def test_windows_that_another_module_gathered_are_recorded(windows):
    part = Neighborhood(WINDOWS[windows], Attend())
    recording, _ = record_and_compare(nn.Sequential(part), lambda model: model(torch.randn(B, C, ROWS, COLUMNS)))
    (call,) = recording.calls
    assert (call.name, call.kind) == ("0.attend", "self")
    found, expected = (x.reshape(B, K, T).sort(2).values for x in (call.map.dense().view(B, T, K).mT, part.weights))
    torch.testing.assert_close(found, expected, rtol=0, atol=EQUAL)


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


def test_deformable_attention_by_grid_sample_has_the_weights_of_the_places_that_each_query_samples():
    part, image = DeformableAttention(), torch.randn(B, 16, C)
    recording, _ = record_and_compare(nn.ModuleList([part]), lambda model: model[0](torch.randn(B, 7, C), image))
    (call,) = recording.calls
    found = call.map.dense()
    assert found.shape == (B * 7, H, 1, 4)
    torch.testing.assert_close(found.view(B, 7, H, 4).transpose(1, 2), part.weights, rtol=0, atol=EQUAL)


class WeightedInPlace(nn.Module):
    """Values that are overwritten before their products with weights are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        values = v.unsqueeze(1).clone()
        weighted = values * (q @ k.mT).softmax(-1).unsqueeze(-1)
        values.zero_()
        return weighted.sum(2)


def test_values_that_were_overwritten_are_missed():
    with torch.no_grad():
        model = nn.Sequential(WeightedInPlace())
        recording, _ = record_and_compare(model, lambda m: m(torch.randn(B, 7, C)), missing=True)
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
    assert len(recording.notes) == 1
    torch.testing.assert_close(found.flatten(), part.weights.flatten(), rtol=0, atol=EQUAL)
