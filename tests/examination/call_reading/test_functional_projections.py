"""Projections by F.linear with the weight of a part that is not called, as torchvision's windows compute them, are seen."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examination.wrong_calls import C, D, H, turn_halves
from regard import Everything
from regard.examination import examine

SIDE, WINDOW = 6, 3  # tokens along an axis of a picture, and of a window


class Windows(nn.Module):
    """Attention in windows of a picture (b, SIDE, SIDE, c), shifted by one token; `hide` makes their bias."""

    def __init__(self, scale=D**-0.5, size=1.0, hide=None):
        super().__init__()
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.scale, self.size, self.hide = scale, size, hide

    def forward(self, x):
        b, n = len(x), WINDOW**2
        x = torch.roll(x, (-1, -1), (1, 2)).unflatten(2, (-1, WINDOW)).unflatten(1, (-1, WINDOW))
        x = x.transpose(2, 3).reshape(-1, n, C)  # (b windows, n, c)
        qkv = F.linear(x * self.size, self.qkv.weight, self.qkv.bias).unflatten(-1, (3, H, D))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q * self.scale @ k.mT + 0.1 * torch.arange(n).cos()
        if self.hide is not None:
            scores = (scores.unflatten(0, (b, -1)) + self.hide(make_regions())[None, :, None]).flatten(0, 1)
        y = F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), self.proj.weight, self.proj.bias)
        return y.view(b, SIDE // WINDOW, SIDE // WINDOW, WINDOW, WINDOW, C).transpose(2, 3).reshape(b, SIDE, SIDE, C)


def make_regions():
    """The region of each token of each window, (windows, n): a row and a column come from the other end of the picture."""
    last = (torch.arange(SIDE) == SIDE - 1).long()
    regions = (2 * last[:, None] + last).unflatten(1, (-1, WINDOW)).unflatten(0, (-1, WINDOW))
    return regions.transpose(1, 2).reshape(-1, WINDOW**2)


def hide_regions(regions):
    return -100.0 * (regions[:, :, None] != regions[:, None])


def hide_later_regions(regions):
    return -100.0 * (regions[:, :, None] < regions[:, None])


def hide_first_everywhere(regions):
    return hide_regions(torch.zeros_like(regions).index_fill_(1, torch.tensor([0]), 1))


def examine_windows(**settings):
    torch.manual_seed(0)
    return examine(Windows(**settings), expects=Everything(), sample=torch.randn(2, SIDE, SIDE, C))


def test_the_scale_and_the_heads_are_known():
    report = examine_windows()
    assert report
    what = [one.what for one in report.checked]
    assert f"the scale of the scores, {D**-0.5:.4g}" in what
    assert f"heads are independent: {H} of width {D}" in what


@pytest.mark.parametrize("hide", [hide_later_regions, hide_first_everywhere])
def test_other_windows_that_hide_tokens_are_a_wrong_mask(hide):
    assert [one.kind for one in examine_windows(hide=hide, size=5.0).findings] == ["wrong mask"]


@pytest.mark.parametrize("base", [100.0, 1.0])
def test_rotated_products_of_parameters_with_an_axis_of_heads_are_read(base):
    """As einsum makes them: right ones, and those whose pairs of columns all have one frequency."""

    class Einsum(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Parameter(torch.randn(C, H, D) / C**0.5) for _ in range(3))
            self.output = nn.Parameter(torch.randn(H, D, C) / C**0.5)

        def forward(self, x):
            t = x.shape[1]
            q, k, v = (torch.einsum("btc,chd->bhtd", x, weight) for weight in (self.query, self.key, self.value))
            angles = torch.arange(t)[:, None] * base ** (-torch.arange(0, D, 2) / D)
            q, k = (turn_halves(y, angles.cos(), angles.sin()) for y in (q, k))
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.einsum("bhtd,hdc->btc", context, self.output)

    torch.manual_seed(0)
    report = examine(Einsum())
    assert [one.kind for one in report.findings] == ([] if base > 1 else ["wrong positions"])
    assert base == 1 or report, str(report)
